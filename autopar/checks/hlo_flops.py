"""The flops of a compiled program's products, read from its optimized HLO text.

Reference: XLA, `HloCostAnalysis::HandleDot` and `HandleConvolution`, which count a loop's body once; here it counts as
often as it runs.
"""

from __future__ import annotations

import math
import re

from autopar.checks import hlo
from autopar.checks.hlo_groups import numbers

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
        shape = numbers(result[2])
        shapes[result[1]] = shape
        product = _PRODUCT.search(line)
        if product is not None:
            lhs, rhs = shapes.get(product[2], ()), shapes.get(product[3], ())
            summed = _contracted(line, lhs) if product[1] == "dot" else _window(line, rhs)
            total += 2.0 * runs * math.prod(shape) * summed
    return total


def _contracted(line: str, lhs: tuple[int, ...]) -> int:
    """The number of elements that a dot sums for each element of its result."""
    match = _CONTRACTED.search(line)
    return math.prod(lhs[d] for d in numbers(match[1])) if match else 1


def _window(line: str, kernel: tuple[int, ...]) -> float:
    """The number of elements that a convolution sums for each of its results: those of the kernel for one output
    channel.
    """
    match = _LABELS.search(line)
    return math.prod(kernel) / kernel[match[1].index("o")] if match and kernel else 1.0
