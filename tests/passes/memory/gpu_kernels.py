"""Arrays that kernels of XLA's GPU compiler write, and a product of two matrices, for the tests of passes/memory."""

from __future__ import annotations

from collections.abc import Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_fusion import fuse
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
