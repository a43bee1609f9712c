"""The cost of kernels on TPUs: the flops of products at the rate of the fastest dtype, and the bytes that are moved.

Collectives cost nothing, as asynchronous ones do.

Reference: XLA's CostAnalysis::GetInstructionElapsedDueToCompute and GetInstructionElapsedDueToMemory
(xla/service/memory_space_assignment/cost_analysis.cc), as of jaxlib 0.10. Added up over twenty large steps of
`benchmarks.compilers` on v5e, these are 0.9 to 1.4 times the cycles that libtpu 0.0.42 writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import cast

from passes.cluster import DeviceSpec
from passes.memory.fusion import Kernel
from passes.memory.moments import Cost, CostOf
from passes.memory.operations import Operation, Shape
from passes.memory.tpu_layouts import stored

FREE = frozenset({"input", "loop", "collective", "result", "part"})
"""Kinds of kernels that take no time of their own."""


def cost_on(device: DeviceSpec) -> CostOf:
    """The cost of a kernel on a device, as a function of it."""
    return partial(
        _cost,
        flops_per_second=max(device.flops_per_second.values()),
        bytes_per_second=device.memory_bytes_per_second,
    )


def _cost(
    kernels: Sequence[Kernel], operations: Sequence[Operation], flops_per_second: float, bytes_per_second: float
) -> Cost:
    made = [kernel.operation for kernel in kernels]
    if operations[made[0]].kind in FREE:
        return Cost()
    reads = {o for kernel in kernels for o in kernel.reads}
    nbytes = sum(stored(operations[o]) for o in (*made, *reads.difference(made)))
    flops, within, seen = 0, made, set(reads.difference(made))
    while within:
        index = within.pop()
        if index not in seen:
            seen.add(index)
            flops += _flops(operations[index], operations)
            within.extend(operations[index].operands)
    return Cost(flops / flops_per_second, nbytes / bytes_per_second)


def _flops(operation: Operation, operations: Sequence[Operation]) -> int:
    """The flops of a product or a convolution, 0 for anything else."""
    if operation.name == "convolution":
        kernel = operations[operation.operands[1]]
        return 2 * operation.size * math.prod(kernel.shape[:-1])
    if operation.kind != "dot":
        return 0
    side, tag = operations[operation.operands[0]], cast("tuple[object, ...]", operation.tag)
    if tag and tag[0] == "merged":
        return 2 * operation.size * side.shape[-1]
    (contracted, _), _ = cast("tuple[tuple[Shape, Shape], tuple[Shape, Shape]]", tag)
    return 2 * operation.size * math.prod(side.shape[d] for d in contracted)
