"""Arrays that kernels of XLA's GPU compiler write, and a product of two matrices, for the tests of passes/memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_collectives import combined
from passes.memory.gpu_cycles import H100
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_priorities import Contents, Priorities
from passes.memory.gpu_times import FUSIBLE, Times
from passes.memory.operations import Operation


def joint(operations: Sequence[Operation], *outputs: int) -> set[tuple[int, ...]]:
    """What kernels of several arrays write."""
    return {kernel.joint for kernel in fuse(operations, outputs)} - {()}


def written(operations: Sequence[Operation], *outputs: int) -> set[int]:
    """The operations that are arrays in memory."""
    return {kernel.operation for kernel in fuse(operations, outputs)}


MATRIX = (((1,), (0,)), ((), ()))


def kernels_of(program: DeviceProgram) -> dict[int, Kernel]:
    return {kernel.operation: kernel for kernel in fuse(program.operations, program.outputs)}


def priorities(every: Sequence[Operation], outputs: Collection[int]) -> Priorities:
    """The kernels of operations before any are fused; outputs are written."""
    readers = [[r for r, reader in enumerate(every) if index in reader.operands] for index in range(len(every))]

    def may_fuse(index: int, _readers: Collection[int], _kernels: Mapping[int, Contents]) -> bool:
        return every[index].kind in FUSIBLE and index not in outputs

    return Priorities(Times(every, H100), readers, range(len(every)), {}, (), may_fuse)


def combined_when_fused(
    operations: Sequence[Operation], outputs: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with collectives combined as their kernels let them, and the new position of each old one."""
    return combined(operations, outputs, fuse(operations, outputs))
