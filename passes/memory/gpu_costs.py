"""Microseconds of kernels and collectives, as the scheduler of XLA's GPU compiler estimates them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.ir import item_nbytes
from passes.memory.fusion import Kernel
from passes.memory.operations import Operation

MEMORY = 3.352e6
"""Bytes per microsecond."""
FLOPS = 5e8
FLOPS_32 = 1.18e7
SENT = 1.787e5


def kernel_microseconds(kernel: Kernel, operations: Sequence[Operation]) -> float:
    operation = operations[kernel.operation]
    if operation.kind == "dot":
        lhs = operations[operation.operands[0]]
        rhs = operations[operation.operands[1]]
        inner = math.sqrt(lhs.size * rhs.size / max(1, operation.size))
        batch = 1
        tag = operation.tag
        if isinstance(tag, tuple) and tag and tag[0] == "merged":
            inner = lhs.shape[-1]
        elif isinstance(tag, tuple) and len(tag) == 2 and isinstance(tag[0], tuple):
            inner = math.prod(lhs.shape[d] for d in tag[0][0])
            if operation.shape and len(operation.shape) == 3 and operation.dtype == "float32" and not tag[1][0]:
                inner = inner / operation.shape[0]
        flops = 2.0 * operation.size * inner
        rate = FLOPS if operation.dtype != "float32" else FLOPS_32
        return max(flops / rate, 1.0)
    if operation.kind == "loop":
        return 0.01
    nbytes = operation.nbytes + sum(operations[o].nbytes for o in kernel.reads)
    return nbytes / MEMORY


def collective_microseconds(nbytes: int) -> float:
    return max(20.0, nbytes / SENT)
