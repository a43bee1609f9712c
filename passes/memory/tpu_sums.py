"""The sums that XLA's TPU compiler takes while the kernel runs that writes what is added up, and what is widened there.

A kernel may write several arrays: what a product or a loop makes, its sums along rows or columns, of what else was
there before as well, and the same in a wider dtype. So none of that reads the array again.

Reference: fusions of several results in the HLO that libtpu 0.0.42 makes of Wide-ResNet (`convert_reduce_fusion`) and
LLaMA, whose logits and their largest are written by the product.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.memory.conversions import widens
from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_fusion import FUSIBLE
from passes.memory.operations import Operation

SCATTERED = "scatter"
"""The beginning of the names of sums that are scattered, which kernels of their own add up."""


def joined(program: DeviceProgram, kernels: Sequence[Kernel], order: Sequence[int]) -> dict[int, int]:
    """The operation that the first kernel writes of those that run as one, by every other operation that it writes."""
    operations = program.operations
    at = {o: position for position, o in enumerate(order)}
    roots: dict[int, int] = {}
    for kernel in sorted(kernels, key=lambda kernel: at[kernel.operation]):
        if not kernel.reads or not _is_made_of(operations, kernel.operation):
            continue
        written = max(kernel.reads, key=at.__getitem__)
        if _writes_more(operations, written) and _is_whole(operations, kernel, written):
            roots[kernel.operation] = roots.get(written, written)
    return roots


def _is_made_of(operations: Sequence[Operation], index: int) -> bool:
    """Whether an operation is a sum, or an array in a wider dtype."""
    operation = operations[index]
    return widens(operations, index) or (operation.kind == "reduce" and not operation.name.startswith(SCATTERED))


def _writes_more(operations: Sequence[Operation], index: int) -> bool:
    """Whether the kernel that writes an operation is a product or a loop."""
    operation = operations[index]
    return (
        operation.kind in FUSIBLE - {"gather"}
        or operation.kind in ("dot", "bitcast")
        or (operation.kind == "opaque" and operation.name == "convolution")
    )


def _is_whole(operations: Sequence[Operation], kernel: Kernel, written: int) -> bool:
    """Whether no array that a kernel reads is larger than the one that was written last."""
    return operations[written].size >= max(operations[o].size for o in kernel.reads)
