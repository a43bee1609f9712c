"""The work of a compiled program's products, read from its optimized HLO text.

Reference: XLA, `HloCostAnalysis::HandleDot` and `HandleConvolution`, which count a loop's body once; here it counts as
often as it runs.
"""

from __future__ import annotations

import math
import re

from autopar.checks import hlo

_RESULT = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]")
_OPERAND = r"(?:\w+\[[^ ]* )?%?([\w.\-]+)"
_PRODUCT = re.compile(rf" (dot|convolution)\({_OPERAND}, {_OPERAND}\)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")


def product_flops(hlo_text: str) -> float:
    """Flops of all `dot` and `convolution` instructions of one call; library calls that hide theirs count nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    total = 0.0
    for line, runs in hlo.instructions(hlo_text):
        result = _RESULT.match(line)
        if result is None:
            continue
        shape = _numbers(result[2])
        shapes[result[1]] = shape
        product = _PRODUCT.search(line)
        if product is not None:
            left, right = shapes.get(product[2], ()), shapes.get(product[3], ())
            summed = _contracted(line, left) if product[1] == "dot" else _window(line, right)
            total += 2.0 * runs * math.prod(shape) * summed
    return total


def _contracted(line: str, left: tuple[int, ...]) -> int:
    """Elements that a dot sums for each of its results."""
    found = _CONTRACTED.search(line)
    return math.prod(left[d] for d in _numbers(found[1])) if found else 1


def _window(line: str, kernel: tuple[int, ...]) -> float:
    """Elements that a convolution sums for each of its results: those of the kernel for one output channel."""
    found = _LABELS.search(line)
    return math.prod(kernel) / kernel[found[1].index("o")] if found and kernel else 1.0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
