"""The copies of arrays that updates write over while other kernels may still read them.

Reference: XLA's CopyInsertion before kernels have an order, as its CPU compiler runs it, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel


def with_copies(program: DeviceProgram, kernels: Sequence[Kernel]) -> tuple[DeviceProgram, Sequence[Kernel]]:
    """The program and its kernels in which an update writes over a copy, if its target is read by a kernel that need
    not run before it.

    Several scatters onto the same zeros have a copy each. A copy is made as soon as what it copies is there.
    """
    operations, by_operation = list(program.operations), {kernel.operation: kernel for kernel in kernels}
    for kernel in kernels:
        update = operations[kernel.operation]
        target = update.operands[0] if update.operands else -1
        if update.kind != "update" or update.name == "sort" or target not in kernel.reads:
            continue
        source = by_operation[target]
        others = [reader for reader in source.readers if reader != kernel.operation]
        if operations[target].kind == "input" or not others or set(others) <= _before(kernel, by_operation):
            continue
        copy, made = len(operations), operations[target]
        operations.append(made._replace(kind="opaque", operands=(target,), tag=("copy", len(operations))))
        operations[kernel.operation] = update._replace(operands=(copy, *update.operands[1:]))
        by_operation[target] = replace(source, readers=(*others, copy))
        by_operation[copy] = Kernel(operation=copy, reads=(target,), over=(), readers=(kernel.operation,))
        reads = tuple(copy if read == target else read for read in kernel.reads)
        over = tuple(copy if read == target else read for read in kernel.over)
        by_operation[kernel.operation] = replace(by_operation[kernel.operation], reads=reads, over=over)
    return replace(program, operations=tuple(operations)), tuple(by_operation.values())


def _before(kernel: Kernel, kernels: dict[int, Kernel]) -> set[int]:
    """The operations of all kernels that must run before this one."""
    before, pending = set[int](), list(kernel.reads)
    while pending:
        if (operation := pending.pop()) not in before:
            before.add(operation)
            pending.extend(kernels[operation].reads)
    return before
