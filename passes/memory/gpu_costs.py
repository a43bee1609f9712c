"""The time of kernels and collectives, as the scheduler of XLA's GPU compiler estimates it.

For Hopper and newer it has estimates in microseconds: of kernels by the bytes that they read and write, of products by
a table of measurements, of collectives by another; Triton's kernels of rows take hardly any. For what came before it
has none, and hides no latency.

Reference: XLA's SolLatencyEstimator, MatmulInterpolator and CollectiveInterpolator, as of jaxlib 0.10. The numbers here
were fitted to what SolLatencyEstimator logs of the steps of `benchmarks.compilers` on eight H100: most products are
within a third of it, collectives from 8 MB within a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from passes.ir import item_nbytes
from passes.memory.fusion import Kernel
from passes.memory.gpu_blocks import ADDED, blocks_of, rates_of
from passes.memory.gpu_cycles import H100
from passes.memory.gpu_tasks import reads_of
from passes.memory.gpu_times import COPY, WIDE
from passes.memory.operations import Operation, Shape

KERNEL = 1.0
"""The cost of what takes hardly any time, the start and the end of a collective: XLA's `kLowCost`."""

LIBRARY_MICROSECONDS = 10.0
"""A convolution by a library, which is not estimated: a hundredth of XLA's `kMediumCost`, as there."""

NBYTES_PER_MICROSECOND = 3.35e6
"""Bytes that the memory of an H100 moves in a microsecond, by its data sheet."""

FLOPS_PER_MICROSECOND, SIDES, MOST_FLOPS_PER_MICROSECOND = 5e8, 2**20, 7.2e8
"""The rate of products whose two shorter sides have 1024 elements, thus `SIDES` in all; that of others goes with the
fourth root of those, up to a limit: fitted, see above."""

FLOAT32_FLOPS_PER_MICROSECOND = 2.1e8
"""The rate of such products of float32: fitted, see above."""

WIDENED_FLOPS_PER_MICROSECOND, WIDENED = 1.18e7, 64
"""The rate of products of narrower numbers that are written in float32, as those in parts are, and the times that it is
lower where a side is short: fitted, see above."""

FLOAT32_PRODUCT_MICROSECONDS = 6.0
"""The least that a product of float32 takes: fitted, see above."""

SHORT, SHORT_RATE, LONG = 512, 1.64e5, 1024
"""The elements of a shortest side below which products are slow, their rate for each element of the longest, and the
elements from which that is no higher: fitted, see above. Tables of XLA's begin with sides of about that length."""

SENT_MICROSECONDS, SENT_NBYTES_PER_MICROSECOND = 30.0, 4.3e5
"""The start of a collective, and the bytes that it sends and receives: fitted, see above."""


def microseconds(joint: Sequence[Kernel], operations: Sequence[Operation]) -> float:
    """The time of a kernel, or of several that are one, on Hopper and newer."""
    operation = operations[joint[0].operation]
    if operation.kind == "dot":
        return _product_microseconds(operation, operations)
    if operation.name == "convolution":
        return LIBRARY_MICROSECONDS
    is_copy = operation.kind == "opaque" and operation.name in ("copy", COPY)
    if operation.kind == "loop" or joint[0].by_rows or is_copy:
        return KERNEL / 100
    if (operation.kind, operation.name) == ("opaque", "slice"):
        return 2 * operation.nbytes / NBYTES_PER_MICROSECOND
    summed = next((k.operation for k in joint if operations[k.operation].name in ADDED), joint[0].operation)
    operation, reads = operations[summed], [operations[o] for o in reads_of(joint)]
    first = operations[operation.operands[0]] if operation.operands else operation
    narrow = any(item_nbytes(read.dtype) < WIDE for read in reads)
    nbytes = [read.nbytes for read in reads]
    moved = sum(nbytes) * rates_of(H100, blocks_of(operation, first, narrow=narrow)).first
    return (moved + sum(operations[kernel.operation].nbytes for kernel in joint)) / NBYTES_PER_MICROSECOND


def _product_microseconds(dot: Operation, operations: Sequence[Operation]) -> float:
    lhs = operations[dot.operands[0]]
    tag = cast("tuple[object, ...]", dot.tag)
    if tag and tag[0] == "merged":
        inner = lhs.shape[-1]
    else:
        contracted, *_ = cast("tuple[tuple[Shape, Shape], ...]", tag)
        inner = math.prod(lhs.shape[d] for d in contracted[0])
    is_float32 = dot.dtype == "float32"
    if is_float32 and lhs.dtype != dot.dtype and len(dot.shape) > 2:  # in parts of the contracted dimension
        inner //= dot.shape[0]
    rows, columns = dot.shape[-2:] if len(dot.shape) > 1 else (1, dot.size)
    shortest, shorter, longest = sorted((inner, rows, columns))
    flops, by_sides = 2 * dot.size * inner, (shortest * shorter / SIDES) ** 0.25
    if is_float32 and lhs.dtype == "float32":
        return FLOAT32_PRODUCT_MICROSECONDS + flops / max(FLOAT32_FLOPS_PER_MICROSECOND * by_sides, 1.0)
    rate = min(MOST_FLOPS_PER_MICROSECOND, FLOPS_PER_MICROSECOND * by_sides)
    if shortest < SHORT:
        rate = min(rate, SHORT_RATE * min(longest, LONG))
        return flops / max(rate / WIDENED if is_float32 else rate, 1.0)
    return flops / max(WIDENED_FLOPS_PER_MICROSECOND if is_float32 else rate, 1.0)


def collective_microseconds(nbytes: int) -> float:
    """The time of a collective, given the bytes that it sends and receives, on Hopper and newer."""
    return SENT_MICROSECONDS + nbytes / SENT_NBYTES_PER_MICROSECOND
