"""The flops of a compiled program's products, read from its optimized HLO text.

XLA:TPU makes convolutions of products too: the window spans a dimension that both operands have, one of them dilated or
of a single element, and meets an element in few of its positions. Only those count there. The padding of an image
counts, as it does in plans.

Reference: XLA, `HloCostAnalysis::HandleDot` and `HandleConvolution`, which count a loop's body once, where here it
counts as often as it runs, and no padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache

from autopar.checks import hlo
from autopar.checks.hlo_groups import numbers

_RESULT = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]")
_OPERAND = r"(?:\w+\[[^ ]* )?%?([\w.\-]+)"
_PRODUCT = re.compile(rf" (dot|convolution)\({_OPERAND}, {_OPERAND}\)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_BATCH_GROUPS = re.compile(r"batch_group_count=(\d+)")


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
            made = _of_dot(line, shape, lhs) if product[1] == "dot" else _of_convolution(line, shape, lhs, rhs)
            total += 2.0 * runs * made
    return total


def _of_dot(line: str, shape: tuple[int, ...], lhs: tuple[int, ...]) -> int:
    """The multiplications of a dot: what it sums for each element of its result."""
    match = _CONTRACTED.search(line)
    return math.prod(shape) * (math.prod(lhs[d] for d in numbers(match[1])) if match else 1)


def _of_convolution(line: str, shape: tuple[int, ...], lhs: tuple[int, ...], rhs: tuple[int, ...]) -> float:
    """The multiplications of a convolution: each pair of channels, for every image and where its window meets it."""
    labels = _LABELS.search(line)
    if labels is None or not lhs or not rhs:
        return float(math.prod(shape))
    operand, kernel, result = labels.groups()
    groups = _BATCH_GROUPS.search(line)
    batch = lhs[operand.index("b")] / (int(groups[1]) if groups else 1)
    meetings = math.prod(
        _meetings(lhs[operand.index(name)], rhs[kernel.index(name)], shape[result.index(name)], *window)
        for name, window in zip(sorted(set(operand) - {"b", "f"}), _windows(line), strict=False)
    )
    return batch * rhs[kernel.index("i")] * rhs[kernel.index("o")] * meetings


def _windows(line: str) -> Iterator[tuple[int, int, int, int]]:
    """The stride, the padding before, and the dilations of operand and kernel, for each dimension of a window."""
    match = _WINDOW.search(line)
    fields = dict(field.split("=") for field in match[1].split()) if match else {}
    dimensions = len(fields.get("size", "").split("x")) if "size" in fields else 0
    for dimension in range(dimensions):
        values = [fields[n].split("x")[dimension] if n in fields else d for n, d in _DEFAULTS.items()]
        stride, padding, lhs_dilation, rhs_dilation = (int(value.partition("_")[0]) for value in values)
        yield stride, padding, lhs_dilation, rhs_dilation


_DEFAULTS = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
"""The values of a window where its text has none."""


@lru_cache(maxsize=1024)
def _meetings(
    operand: int, kernel: int, result: int, stride: int, padding: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """The pairs of an element of the result and one of the kernel, without those that read nothing where the operand is
    dilated or one element.
    """
    if lhs_dilation == 1 < operand:
        return result * kernel
    positions = (o * stride - padding + k * rhs_dilation for o in range(result) for k in range(kernel))
    last = (operand - 1) * lhs_dilation
    return sum(1 for position in positions if 0 <= position <= last and position % lhs_dilation == 0)
