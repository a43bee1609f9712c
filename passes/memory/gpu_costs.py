"""Microseconds of kernels and collectives, as the scheduler of XLA's GPU compiler estimates them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from passes.memory.fusion import Kernel
from passes.memory.operations import Operation, Shape

MEMORY = 3.35e6
"""Bytes per microsecond."""
FLOPS, SIDES, MOST = 5e8, 2**20, 7.2e8
FLOPS_32 = 1.18e7
SENT, LATENCY = 4.3e5, 30.0


def kernel_microseconds(kernel: Kernel, operations: Sequence[Operation]) -> float:
    operation = operations[kernel.operation]
    if operation.kind == "dot":
        return _product_microseconds(operation, operations)
    if operation.kind == "loop":
        return 0.01
    if operation.name == "convolution":
        return 10.0
    nbytes = operation.nbytes + sum(operations[o].nbytes for o in kernel.reads)
    return nbytes / MEMORY


def _product_microseconds(dot: Operation, operations: Sequence[Operation]) -> float:
    lhs, rhs = (operations[o] for o in dot.operands)
    tag = cast("tuple[object, ...]", dot.tag)
    if tag and tag[0] == "merged":
        inner = lhs.shape[-1]
    else:
        contracted, _ = cast("tuple[tuple[Shape, Shape], tuple[Shape, Shape]]", tag)
        inner = math.prod(lhs.shape[d] for d in contracted[0])
    parts = dot.shape[0] if dot.dtype == "float32" and lhs.dtype != "float32" and len(dot.shape) > 2 else 1
    inner = inner // parts
    rows, columns = dot.shape[-2:] if len(dot.shape) > 1 else (1, dot.size)
    small = sorted((inner, rows, columns))
    rate = FLOPS_32 if dot.dtype == "float32" else min(MOST, FLOPS * (small[0] * small[1] / SIDES) ** 0.25)
    return 2.0 * dot.size * inner / rate


def collective_microseconds(nbytes: int) -> float:
    return LATENCY + nbytes / SENT
