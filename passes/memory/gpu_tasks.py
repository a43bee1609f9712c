"""The tasks that XLA's GPU compiler puts into an order: kernels, starts and ends of collectives, and names of arrays.

A collective is two tasks, from the first of which to the second it is under way. What kernels of loops and sums make
is known by a name of its own, as elements of tuples are, and so is what a product reads. A kernel that makes
little of a large array is one with the first of the array's other readers, and stands just before it: so the loss of
each token is there when the gradient of the logits is, and nothing keeps the logits longer. A copy in another order is
made by the kernel that makes another array of that size of the same, and weights are converted once more by the kernel
that updates them, if that does not wait for it. An array that memory moves before a kernel has started is read once
more: kernels stay apart. A number that is made of what a collective sends, as the loss is, is made with what else is,
however small that is.

Reference: XLA's async collectives and MultiOutputFusion for GPUs, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise

from passes.memory.all_reduces import mask_of
from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_fusion import COPY
from passes.memory.gpu_weights import AGAIN
from passes.memory.operations import Operation

LITTLE = 16
"""The times that an array has the elements of what a kernel makes of it, from which that is little. A ratio: a row of
classes or scores has more elements than this, a group of heads has fewer."""

LAUNCH_NBYTES = 3 * 2**20
"""The bytes that memory moves while a kernel starts: about a microsecond on H100."""

LOOPS = frozenset({"elementwise", "expensive", "rearrange", "broadcast", "gather"})
"""Kinds whose kernels compute element after element."""

NAMED = LOOPS | {"reduce"}
"""Kinds whose kernels mostly make several arrays, or one that is read in another shape: so there is a name between."""

SOURCES = frozenset({"input", "literal"})
"""Kinds that are there before anything runs."""


COPIES = frozenset({COPY, AGAIN})
"""The names of what one kernel makes with another array of that size of the same."""


class Role(IntEnum):
    """The sort of a task: a kernel that runs, a name of an array, and the start and the end of a collective."""

    RUN = 0
    NAME = 1
    START = 2
    END = 3


@dataclass(slots=True)
class Tasks:
    """The tasks of a program; operation -1 stands for a name that the program does not have, as the last task is.

    `reads` and `readers` are tasks, by task. `transposed` are the operations that are a product as its kernel writes
    it, columns for rows, by the product: they are no tasks.
    """

    operations: list[int] = field(default_factory=list[int])
    roles: list[Role] = field(default_factory=list[Role])
    reads: list[list[int]] = field(default_factory=list[list[int]])
    readers: list[list[int]] = field(default_factory=list[list[int]])
    transposed: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

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
    before, together = beside(operations, kernels), copies(operations, kernels)
    for copy, other in together.items():
        before.setdefault(other, []).append(copy)
        for kernel in kernels:
            if copy in kernel.reads:
                before.setdefault(kernel.operation, []).append(other)
    task_of: dict[int, int] = {}
    for kernel in _at_once(kernels, together, before):
        made, operation = kernel.operation, operations[kernel.operation]
        if _is_transposed(kernel, operations):
            (product,) = kernel.reads
            tasks.transposed.setdefault(product, []).append(made)
            task_of[made] = task_of[product]
            continue
        reads = [task_of[r] for r in dict.fromkeys((*before.get(made, ()), *kernel.reads))]
        if operation.kind == "dot":
            reads = [r if tasks.roles[r] == Role.NAME else tasks.add(-1, Role.NAME, [r]) for r in reads]
        if operation.kind == "collective":
            task_of[made] = tasks.add(made, Role.END, [tasks.add(made, Role.START, reads)])
        elif _is_name(operation, kernel):
            task_of[made] = tasks.add(made, Role.NAME, reads)
        else:
            task = tasks.add(made, Role.RUN, reads)
            task_of[made] = tasks.add(-1, Role.NAME, [task]) if operation.kind in NAMED else task
    tasks.add(-1, Role.NAME, list(dict.fromkeys(task_of[o] for o in program.outputs if o in task_of)))
    return tasks


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


def beside(operations: Sequence[Operation], kernels: Sequence[Kernel]) -> dict[int, list[int]]:
    """The kernels that make little of a large array, or a number of what a collective sends, by the first of its other
    readers, which comes later.
    """
    readers: dict[int, list[int]] = {}
    for kernel in kernels:
        for read in kernel.reads:
            readers.setdefault(read, []).append(kernel.operation)
    before: dict[int, list[int]] = {}
    for array, siblings in readers.items():
        described = operations[array]
        if described.nbytes < LAUNCH_NBYTES and described.kind != "collective":
            continue
        little = [o for o in siblings if _makes_little(operations[o], described)]
        if described.nbytes < LAUNCH_NBYTES:
            little = [o for o in little if operations[o].size == 1]
        others = [o for o in siblings if o not in little and operations[o].kind != "loop"]
        if others and (earlier := [o for o in little if o < min(others)]):
            before.setdefault(min(others), []).extend(earlier)
    return before


def copies(operations: Sequence[Operation], kernels: Sequence[Kernel]) -> dict[int, int]:
    """The kernels that copy an array in another order, or convert weights once more -> the next that makes as much of
    it and does not wait for them: one kernel makes both.
    """
    readers: dict[int, list[int]] = {}
    for kernel in kernels:
        made = operations[kernel.operation]
        for read in kernel.reads:
            if made.kind in LOOPS and made.size == operations[read].size:
                readers.setdefault(read, []).append(kernel.operation)
    pairs = [pair for made in readers.values() for pair in pairwise(made) if _is_made_beside(operations, *pair)]
    together: dict[int, int] = {}
    bits = {made: 1 << bit for bit, made in enumerate(dict.fromkeys(made for pair in pairs for made in pair))}
    before = _before(kernels, bits) if pairs else {}
    for copy, other in pairs:
        if before[other] & bits[copy] or before[copy] & bits[other]:
            continue
        together[copy] = other
        joint = before[copy] | before[other]  # both read what either does, and the copy names what the other makes
        for made, mask in before.items():
            if mask & bits[copy] or made == copy:
                before[made] = mask | joint | bits[other]
            elif mask & bits[other] or made == other:
                before[made] = mask | joint
    return together


def _is_made_beside(operations: Sequence[Operation], copy: int, other: int) -> bool:
    """Whether an operation is made by the kernel of another one that reads the same."""
    return operations[copy].name in COPIES and operations[other].name not in COPIES


def _at_once(
    kernels: Sequence[Kernel], together: Mapping[int, int], before: Mapping[int, Sequence[int]]
) -> list[Kernel]:
    """The kernels in an order in which each comes behind what it reads and what is `before` it, those made `together`
    with others reading what these read as well.
    """
    if not together:
        return list(kernels)
    known = {kernel.operation: kernel for kernel in kernels}
    for copy, other in together.items():
        reads = dict.fromkeys((*known[copy].reads, *known[other].reads))
        known[copy] = replace(known[copy], reads=tuple(reads))
    ordered: dict[int, Kernel] = {}
    for kernel in kernels:
        pending = [kernel.operation]
        while pending:
            made = pending[-1]
            waiting = [o for o in (*before.get(made, ()), *known[made].reads) if o not in ordered]
            if waiting:
                pending.append(waiting[0])
            else:
                ordered[pending.pop()] = known[made]
    return list(ordered.values())


def _before(kernels: Sequence[Kernel], bits: Mapping[int, int]) -> dict[int, int]:
    """The operations that come before each of those with a bit in every order, as bits."""
    masks: dict[int, int] = {}
    for kernel in kernels:
        masks[kernel.operation] = mask_of(kernel.reads, masks, bits)
    return {made: masks[made] for made in bits}


def _makes_little(made: Operation, read: Operation) -> bool:
    return made.kind in (*LOOPS, "reduce") and LITTLE * made.size <= read.size
