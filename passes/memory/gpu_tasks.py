"""The tasks that XLA's GPU compiler puts into an order: kernels, starts and ends of collectives, and names of arrays.

A collective is two tasks, from the first of which to the second it is under way. Kernels that are one are one task
(passes/memory/gpu_joint_kernels.py), and what they make is known by names, as elements of tuples are; so is what a
product reads.

Reference: XLA's async collectives and elements of tuples, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.operations import Operation

SOURCES = frozenset({"input", "literal"})
"""Kinds that are there before anything runs."""


class Role(IntEnum):
    """The sort of a task: a kernel that runs, a name of an array, and the start and the end of a collective."""

    RUN = 0
    NAME = 1
    START = 2
    END = 3


@dataclass(slots=True)
class Tasks:
    """The tasks of a program; operation -1 stands for a name that the program does not have, as the last task is.

    `reads` and `readers` are tasks, by task. `beside` are the operations that one kernel makes beside another, by that:
    of what is `joint`, each task is a name, and a product as its kernel writes it, columns for rows, is no task.
    """

    operations: list[int] = field(default_factory=list[int])
    roles: list[Role] = field(default_factory=list[Role])
    reads: list[list[int]] = field(default_factory=list[list[int]])
    readers: list[list[int]] = field(default_factory=list[list[int]])
    beside: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    joint: set[int] = field(default_factory=set[int])

    def add(self, operation: int, role: Role, reads: Sequence[int]) -> int:
        """The new task that reads these."""
        task = len(self.operations)
        self.operations.append(operation)
        self.roles.append(role)
        self.reads.append(list(reads))
        self.readers.append([])
        for read in reads:
            self.readers[read].append(task)
        return task

    def started(self, task: int) -> int:
        """The task that makes an array, given the task that names it."""
        while self.roles[task] == Role.END or self.operations[task] < 0:
            task = self.reads[task][0]
        return task

    def __len__(self) -> int:
        return len(self.operations)


def tasks_of(program: DeviceProgram, kernels: Sequence[Kernel]) -> Tasks:
    """The tasks of a program, each behind what it reads; the last reads all outputs."""
    operations, tasks = program.operations, Tasks()
    task_of: dict[int, int] = {}
    for kernel, *others in at_once(kernels):
        made, operation = kernel.operation, operations[kernel.operation]
        if _is_transposed(kernel, operations):
            (product,) = kernel.reads
            tasks.beside.setdefault(product, []).append(made)
            task_of[made] = task_of[product]
            continue
        reads = [task_of[r] for r in reads_of((kernel, *others))]
        if operation.kind == "dot":
            reads = [r if tasks.roles[r] == Role.NAME else tasks.add(-1, Role.NAME, [r]) for r in reads]
        if operation.kind == "collective":
            task_of[made] = tasks.add(made, Role.END, [tasks.add(made, Role.START, reads)])
        elif _is_name(operation, kernel):
            task_of[made] = tasks.add(made, Role.NAME, reads)
        else:
            task = task_of[made] = tasks.add(made, Role.RUN, reads)
            if others:
                task_of[made] = tasks.add(-1, Role.NAME, [task])
            for other in others:
                tasks.beside.setdefault(made, []).append(other.operation)
                task_of[other.operation] = tasks.add(other.operation, Role.NAME, [task])
                tasks.joint.add(task_of[other.operation])
    tasks.add(-1, Role.NAME, list(dict.fromkeys(task_of[o] for o in program.outputs if o in task_of)))
    return tasks


def at_once(kernels: Sequence[Kernel]) -> list[tuple[Kernel, ...]]:
    """The kernels, those that are one together, each behind what it reads."""
    known = {kernel.operation: kernel for kernel in kernels}
    placed, ordered = set[int](), list[tuple[Kernel, ...]]()
    for kernel in kernels:
        pending = [kernel.operation]
        while pending:
            if (made := pending[-1]) in placed:
                pending.pop()
                continue
            group = tuple([known[o] for o in known[made].joint or (made,)])
            waiting = next((read for read in reads_of(group) if read not in placed), None)
            if waiting is not None:
                pending.append(waiting)
                continue
            placed.update(member.operation for member in group)
            ordered.append(group)
    return ordered


def reads_of(group: Sequence[Kernel]) -> tuple[int, ...]:
    """The operations that kernels which are one read of what they do not write."""
    written = {kernel.operation for kernel in group}
    return tuple(dict.fromkeys(read for kernel in group for read in kernel.reads if read not in written))


def _is_name(operation: Operation, kernel: Kernel) -> bool:
    """Whether an operation gives an array another name, or a barrier, which takes no time."""
    if operation.kind == "bitcast":
        return kernel.reads == operation.operands
    return operation.kind in (*SOURCES, "part", "result") or (operation.kind, operation.shape) == ("opaque", (0,))


def _is_transposed(kernel: Kernel, operations: Sequence[Operation]) -> bool:
    """Whether a kernel only is a product with columns for rows."""
    operation = operations[kernel.operation]
    if operation.kind != "bitcast" or len(operation.shape) != 2 or kernel.reads != operation.operands:
        return False
    product = operations[operation.operands[0]]
    return product.kind == "dot" and operation.shape == product.shape[::-1]
