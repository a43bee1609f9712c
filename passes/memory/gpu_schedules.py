"""The order that XLA's GPU compiler starts from: of three orders the one in which least is live.

    greedy        whatever frees most runs next                                          `greedy`
    depth first   operands first, those with most readers behind them before the others  `depth_first`
    post-order    operands first, as they are listed                                     `post_order`

In each, collectives are started as early and ended as late as what they read and what reads them allows.

Reference: XLA's ListScheduler, DFSMemoryScheduler, PostOrderScheduler, DefaultMemoryScheduler, and PostProcessSchedule
for GPUs, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_tasks import SOURCES, Role, Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """The bytes of arrays, and how tasks relate to them: an array is known by a task.

    `names` are the arrays that a task's result is, `made_nbytes` the bytes of all that it makes, and `written_over`
    the arrays that it may write its own over.
    """

    names: Sequence[tuple[int, ...]]
    nbytes: Sequence[int]
    made_nbytes: Sequence[int]
    written_over: Sequence[tuple[int, ...]]


def ordered(program: DeviceProgram, kernels: Sequence[Kernel], tasks: Tasks) -> list[int]:
    """The tasks in the order in which least is live, the first such of the three."""
    arrays = arrays_of(program, kernels, tasks)
    orders = greedy(program, tasks, arrays), depth_first(tasks, arrays), post_order(tasks)
    return min((spread(tasks, order) for order in orders), key=lambda order: live_nbytes(tasks, arrays, order))


def arrays_of(program: DeviceProgram, kernels: Sequence[Kernel], tasks: Tasks) -> Arrays:
    """The arrays that tasks make and read."""
    operations, over = program.operations, {kernel.operation: kernel.over for kernel in kernels}
    names: list[tuple[int, ...]] = []
    nbytes, made_nbytes = [0] * len(tasks), [0] * len(tasks)
    written_over: list[tuple[int, ...]] = [()] * len(tasks)
    task_of = {o: task for task, o in enumerate(tasks.operations) if o >= 0 and tasks.roles[task] != Role.END}
    for task, (o, role) in enumerate(zip(tasks.operations, tasks.roles, strict=True)):
        kind = operations[o].kind if o >= 0 else ""
        if kind in SOURCES:
            names.append(())
        elif role in (Role.RUN, Role.START) or kind == "result" or task in tasks.joint:
            names.append((task,))
            nbytes[task] = operations[o].nbytes
            maker = tasks.started(tasks.reads[task][0]) if role == Role.NAME else task
            made_nbytes[maker] += nbytes[task]
            if role == Role.RUN or task in tasks.joint:
                reads = operations[o].operands[:1] if kind == "update" else over[o]
                written_over[task] = tuple(task_of[r] for r in reads if r in task_of)
        else:
            is_alias = role == Role.NAME and o >= 0
            reads = tasks.reads[task][:1] if is_alias else tasks.reads[task]
            names.append(tuple(dict.fromkeys(name for read in reads for name in names[read])))
    return Arrays(names=names, nbytes=nbytes, made_nbytes=made_nbytes, written_over=written_over)


def greedy(program: DeviceProgram, tasks: Tasks, arrays: Arrays) -> list[int]:
    """The tasks in an order where the next frees most, of equal ones that with most readers, the last to be ready.

    Numbers run as soon as they can.
    """
    used = [tuple(dict.fromkeys(name for read in reads for name in arrays.names[read])) for reads in tasks.reads]
    users: dict[int, list[int]] = {}
    for task, names in enumerate(used):
        for name in names:
            users.setdefault(name, []).append(task)
    uses = {name: len(readers) for name, readers in users.items()}
    for name in arrays.names[-1]:
        uses[name] = uses.get(name, 0) + 1
    numbers = bytearray(len(tasks))
    for task, o in enumerate(tasks.operations):
        numbers[task] = o >= 0 and program.operations[o].size == 1 and tasks.roles[task] != Role.START

    def freed(task: int) -> tuple[float, float]:
        if numbers[task]:
            return (-math.inf, -math.inf)
        nbytes = sum(arrays.nbytes[name] for name in used[task] if uses[name] == 1)
        return (arrays.made_nbytes[task] - nbytes, -len(tasks.readers[task]))

    waiting = [len(reads) for reads in tasks.reads]
    ready, order = _Ready(freed), list[int]()
    for task in range(len(tasks)):
        if not waiting[task]:
            ready.add(task)
    while (task := ready.pop()) >= 0:
        order.append(task)
        freeing: list[int] = []
        for name in used[task]:
            uses[name] -= 1
            freeing.extend(users[name] if uses[name] == 1 else ())
        for reader in tasks.readers[task]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.add(reader)
        ready.update(freeing)
    return order


class _Ready:
    """Tasks by a priority that may grow, the least first, of equal ones the last that was added."""

    def __init__(self, priority: Callable[[int], tuple[float, float]]) -> None:
        self.priority = priority
        self.heap: list[tuple[tuple[float, float], int, int]] = []
        self.current: dict[int, tuple[float, float]] = {}
        self.added = 0

    def add(self, task: int) -> None:
        self.added += 1
        self.current[task] = self.priority(task)
        heapq.heappush(self.heap, (self.current[task], -self.added, task))

    def update(self, tasks: Sequence[int]) -> None:
        """Adds the tasks that are there once more, where their priorities changed."""
        for task in tasks:
            if task in self.current and self.priority(task) != self.current[task]:
                self.add(task)

    def pop(self) -> int:
        """The task of least priority, -1 if there is none."""
        while self.heap:
            priority, _, task = heapq.heappop(self.heap)
            if self.current.get(task) == priority:
                del self.current[task]
                return task
        return -1


def depth_first(tasks: Tasks, arrays: Arrays) -> list[int]:
    """The tasks in post-order, of the operands of each those first that have most readers behind them, then bytes.

    Both are counted along every path, up to the number of tasks and to the bytes of those before.
    """
    readers, nbytes, total = [0] * len(tasks), [0] * len(tasks), 0
    for task in post_order(tasks):
        if tasks.reads[task] or tasks.roles[task] != Role.NAME:
            total += arrays.made_nbytes[task]
            behind = sum(readers[read] for read in tasks.reads[task])
            readers[task] = min(len(tasks), max(0, len(tasks.readers[task]) - 1) + behind)
            nbytes[task] = min(total, arrays.made_nbytes[task] + sum(nbytes[read] for read in tasks.reads[task]))
    return post_order(tasks, lambda task: (-readers[task], -nbytes[task], task))


def post_order(tasks: Tasks, key: Callable[[int], tuple[int, ...]] | None = None) -> list[int]:
    """The tasks, each behind what it reads, from the last; what nothing leads to comes first.

    The reads of a task are visited as they are listed, or by a key.
    """
    opened, closed = bytearray(len(tasks)), bytearray(len(tasks))
    order, pending = list[int](), [len(tasks) - 1]
    while pending:
        task = pending[-1]
        if opened[task]:
            pending.pop()
            if not closed[task]:
                closed[task] = True
                order.append(task)
            continue
        opened[task] = True
        reads = [read for read in tasks.reads[task] if not opened[read]]
        pending.extend(reversed(sorted(reads, key=key) if key else reads))
    return [*(task for task in range(len(tasks)) if not closed[task]), *order]


def spread(tasks: Tasks, order: Sequence[int]) -> list[int]:
    """The order with collectives started as early and ended as late as can be."""
    early = _pulled(order, tasks.reads, tasks.readers, [role == Role.START for role in tasks.roles])
    late = _pulled(early[::-1], tasks.readers, tasks.reads, [role == Role.END for role in tasks.roles])
    return late[::-1]


def _pulled(
    order: Sequence[int], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], moves: Sequence[bool]
) -> list[int]:
    """The order with the tasks that move right after the last of those `before` them."""
    waiting, placed = [len(tasks) for tasks in before], bytearray(len(order))
    pulled: list[int] = []
    for task in order:
        pending = [task]
        for current in pending:
            if placed[current]:
                continue
            placed[current] = True
            pulled.append(current)
            for following in after[current]:
                waiting[following] -= 1
                if current == task and moves[following] and not waiting[following]:
                    pending.append(following)
    return pulled


def live_nbytes(tasks: Tasks, arrays: Arrays, order: Sequence[int]) -> int:
    """The most bytes of arrays that live at once, but for those that are returned, which have places of their own."""
    at, last = [0] * len(tasks), [0] * len(tasks)
    for moment, task in enumerate(order):
        at[task] = last[task] = moment
        for read in tasks.reads[task]:
            for name in arrays.names[read]:
                last[name] = moment
    returned, change = set(arrays.names[-1]), [0] * (len(order) + 1)
    for task, nbytes in enumerate(arrays.nbytes):
        if not nbytes or task in returned:
            continue
        is_result = tasks.roles[task] == Role.NAME
        begin = at[tasks.started(tasks.reads[task][0])] if is_result else at[task]
        change[begin] += nbytes
        change[last[task] + 1] -= nbytes
        over = arrays.written_over[task]
        if any(last[read] == begin and arrays.nbytes[read] == nbytes for read in over):
            change[begin] -= nbytes
            change[begin + 1] += nbytes
    most = live = 0
    for step in change:
        live += step
        most = max(most, live)
    return most
