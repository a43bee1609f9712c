"""Scatters into padding that is cut off, which XLA leaves out: what is scattered there is lost anyway.

So the transpose of max-pooling scatters into zeros of the shape of its images, and where a rectifier before it compares
with zeros of that shape, these are the same: they have to be in memory for the scatter, and so they are from the first
kernel that reads them on. That is in the forward pass. As zeros are chosen behind the scatter again, it writes over a
copy of them, which is made before there is what is scattered.

Reference: AlgebraicSimplifierVisitor::HandleSlice of xla/hlo/transforms/simplifiers/algebraic_simplifier.cc, HloCSE,
CopyInsertion before kernels have an order, and what `xla_dump_to` has of Wide-ResNet on eight H100 and A100:
`loop_broadcast_maximum_fusion`, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.operations import Operation, Shape
from passes.memory.windows import HEAD


def unpadded(operations: Sequence[Operation]) -> list[Operation]:
    """The operations with scatters into what is kept of them alone, of zeros that are there already if some are."""
    changed = list(operations)
    read = Counter(o for operation in operations for o in operation.operands)
    zeros: dict[tuple[tuple[int, ...], Shape], int] = {}
    for index, operation in enumerate(operations):
        if operation.kind == "broadcast":
            zeros.setdefault((operation.operands, operation.shape), index)
        if operation.name != "slice" or HEAD not in cast("tuple[object, ...]", operation.tag):
            continue
        (scatter,) = operation.operands
        into, *places = operations[scatter].operands
        kept = zeros.get((operations[into].operands, operation.shape), scatter)
        if kept >= scatter:
            if read[into] > 1 or operations[into].kind != "broadcast":
                continue
            kept, changed[into] = into, operations[into]._replace(shape=operation.shape)
        changed[scatter] = operations[scatter]._replace(operands=(kept, *places), shape=operation.shape)
        changed[index] = operation._replace(kind="bitcast")
    return changed


def added(operations: Sequence[Operation], outputs: Sequence[int]) -> list[Operation]:
    """The operations with scatters onto a sum as sums with what is scattered onto zeros, where that is read as it is.

    The gradient of a cross-entropy's log-probabilities is such: what is scattered for the labels is summed along rows,
    too. Only where nothing else reads it does XLA scatter onto the other summand.
    """
    needed = bytearray(len(operations))
    for output in outputs:
        needed[output] = True
    for index in reversed(range(len(operations))):
        for o in operations[index].operands if needed[index] else ():
            needed[o] = True
    changed = list(operations)
    onto_zeros: dict[tuple[tuple[int, ...], object], int] = {}
    for index, operation in enumerate(operations):
        if operation.kind != "update" or not operation.name.startswith("scatter") or not needed[index]:
            continue
        into, *places = operation.operands
        key = (tuple(places), operation.tag)
        first = onto_zeros.setdefault(key, index)
        if first != index and operations[first].shape == operation.shape:
            changed[index] = operation._replace(kind="elementwise", operands=(into, first), tag="add")
    return changed


def with_copies(program: DeviceProgram, kernels: Sequence[Kernel]) -> tuple[DeviceProgram, Sequence[Kernel]]:
    """The program and its kernels, in which a scatter writes over a copy of what a kernel behind it reads."""
    operations, by_operation = list(program.operations), {kernel.operation: kernel for kernel in kernels}
    readers: dict[int, list[int]] = {}
    for kernel in kernels:
        for read in kernel.reads:
            readers.setdefault(read, []).append(kernel.operation)
    for kernel in kernels:
        scatter = operations[kernel.operation]
        target = scatter.operands[0] if scatter.kind == "reduce" and scatter.name.startswith("scatter") else -1
        others = {reader for reader in readers.get(target, ()) if reader != kernel.operation}
        if not others or operations[target].kind == "input" or others.isdisjoint(_behind(kernel.operation, readers)):
            continue
        copy = len(operations)
        operations.append(operations[target]._replace(kind="opaque", operands=(target,), value=-1, tag=("copy", copy)))
        operations[kernel.operation] = scatter._replace(operands=(copy, *scatter.operands[1:]))
        by_operation[copy] = Kernel(operation=copy, reads=(target,), over=())
        reads, over = (tuple([copy if o == target else o for o in read]) for read in (kernel.reads, kernel.over))
        by_operation[kernel.operation] = replace(kernel, reads=reads, over=over)
    return replace(program, operations=tuple(operations)), tuple(by_operation.values())


def _behind(operation: int, readers: Mapping[int, Sequence[int]]) -> set[int]:
    """The operations of all kernels that must run after that of this one."""
    behind, pending = set[int](), [operation]
    while pending:
        new = [reader for reader in readers.get(pending.pop(), ()) if reader not in behind]
        behind.update(new)
        pending.extend(new)
    return behind
