"""The order in which XLA's GPU compiler runs kernels: as late as what waits for them allows, behind collectives.

The scheduler goes from the last task to the first. Where several are ready, nothing waiting for them any more, it
prefers, in this order:

    the end of a collective, if none is under way
    what is ready now to what is ready in a microsecond, as what a name stands for is
    the start of a collective, if the end of another waits for it, and the other way round if nothing precedes it
    what has most time of collectives before it
    what takes about as long as the collective that is under way still does, or whatever else is awaited
    what reads an array that a collective makes
    what most arrays wait for alone, all their other readers being placed
    the later in the order that it starts from (passes/memory/gpu_schedules.py)

So what only later collectives need, as the products that make gradients of weights do, fills the time of those that are
under way, and all that those products read is in memory until then.

GPUs before Hopper keep the order that it starts from: XLA's option for this is off by default, and it puts it on where
it has measured times, which is from Hopper on.

Reference: XLA's LatencyHidingScheduler with GpuAsyncTracker, and ReadySetLt, and SolLatencyEstimator's
IsSupportedForModule, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_costs import KERNEL, collective_microseconds, microseconds
from passes.memory.gpu_schedules import ordered
from passes.memory.gpu_tasks import Role, Tasks, tasks_of

HOP = 1.0
"""The time between a task and what it reads, in the unit of costs: XLA's `kLowLatency`."""

Kind = tuple[float, int, int]
"""What tasks that are equal but for their positions have in common: cost, whether they read what a collective makes,
and the arrays that wait for no other reader."""


def schedule(program: DeviceProgram, kernels: Sequence[Kernel], *, hides: bool = True) -> list[int]:
    """The operations that kernels write, in the order in which they run; inputs come first.

    The latency of collectives is hidden only where there are any and the compiler `hides` it.
    """
    tasks = tasks_of(program, kernels)
    order = ordered(program, kernels, tasks)
    if hides and Role.START in tasks.roles:
        loops = frozenset(task for task, o in enumerate(tasks.operations) if o in program.sending)
        barriers = frozenset(task for task, o in enumerate(tasks.operations) if o >= 0 and _is_barrier(program, o))
        order = _Backwards(tasks, order, *_estimates(program, kernels, tasks), loops, barriers).run()
    return listed(program, tasks, order)


def _is_barrier(program: DeviceProgram, operation: int) -> bool:
    """Whether an operation is one of the two that several arrays pass a barrier by."""
    described = program.operations[operation]
    return (described.kind, described.name, described.shape) == ("opaque", "barrier", (0,))


def listed(program: DeviceProgram, tasks: Tasks, order: Sequence[int]) -> list[int]:
    """The operations that tasks in an order stand for; inputs come first."""
    made: list[int] = []
    for task in order:
        if tasks.roles[task] != Role.END and task not in tasks.joint:
            operation = tasks.operations[task]
            made.extend((operation, *tasks.beside.get(operation, ())))
    inputs = [o for o in made if o >= 0 and program.operations[o].kind == "input"]
    return [*inputs, *(o for o in made if o >= 0 and program.operations[o].kind != "input")]


def _estimates(program: DeviceProgram, kernels: Sequence[Kernel], tasks: Tasks) -> tuple[list[float], list[float]]:
    """The cost of each task, and the latency from each start of a collective to its end."""
    operations, by_operation = program.operations, {kernel.operation: kernel for kernel in kernels}
    costs, latencies = [0.0] * len(tasks), [0.0] * len(tasks)
    for task, (o, role) in enumerate(zip(tasks.operations, tasks.roles, strict=True)):
        if role == Role.RUN:
            made = [o, *(other for other in tasks.beside.get(o, ()) if other in by_operation[o].joint)]
            costs[task] = microseconds([by_operation[m] for m in made], operations)
        elif role in (Role.START, Role.END):
            costs[task] = KERNEL
        if role == Role.END:
            (start,) = tasks.reads[task]
            results = [tasks.operations[reader] for reader in tasks.readers[task]]
            moved = [o, *by_operation[o].reads, *(r for r in results if r >= 0 and operations[r].kind == "result")]
            nbytes = sum(operations[m].nbytes for m in moved)
            latencies[start] = collective_microseconds(nbytes)
    return costs, latencies


class _Backwards:
    """The tasks not yet placed, from the end.

    `ready_at` is the time from which a task may be placed. What is ready is in one of `names`, `ends` and `starts`, or
    among the other tasks in `kinds`, by depth and kind, in the given order; `pending` are those to come. `kind_of` has
    the kind of each of those tasks.
    A loop that is `sending` inside is one of the ends: nothing may be under way beside it. `barriers` are names that
    wait as kernels do.
    """

    def __init__(
        self,
        tasks: Tasks,
        order: Sequence[int],
        costs: Sequence[float],
        latencies: Sequence[float],
        sending: frozenset[int],
        barriers: frozenset[int],
    ) -> None:
        self.tasks, self.costs, self.latencies = tasks, costs, latencies
        self.sending, self.barriers = sending, barriers
        self.position = [0] * len(tasks)
        for position, task in enumerate(order):
            self.position[task] = position
        self.waiting = [len(readers) for readers in tasks.readers]
        self.placed = bytearray(len(tasks))
        self.depth, self.reads_end = self._depths()
        self.alone = [sum(len(tasks.readers[read]) == 1 for read in reads) for reads in tasks.reads]
        self.now, self.under_way = 0.0, False
        self.ready_at = [0.0] * len(tasks)
        self.names: list[int] = []
        self.ends: list[int] = []
        self.starts: list[int] = []
        self.pending: list[tuple[float, int]] = []
        self.kinds: dict[float, dict[Kind, list[tuple[int, int]]]] = {}
        self.kind_of: dict[int, Kind] = {}
        self.awaited: list[float] = []

    def _depths(self) -> tuple[list[float], bytearray]:
        """The time of the collectives before each task, and whether it reads the end of some."""
        tasks = self.tasks
        depth, reads_end = [0.0] * len(tasks), bytearray(len(tasks))
        for task, reads in enumerate(tasks.reads):
            is_end = tasks.roles[task] == Role.END
            latest = max((depth[r] + (self.latencies[r] if is_end else 0.0) for r in reads), default=0.0)
            depth[task] = latest
            reads_end[task] = any(tasks.roles[r] == Role.END for r in reads)
        return depth, reads_end

    def run(self) -> list[int]:
        """The tasks in the order in which they run."""
        for task, waiting in enumerate(self.waiting):
            if not waiting:
                self._release(task, 0.0)
        backwards: list[int] = []
        while len(backwards) < len(self.tasks):
            backwards.append(task := self._next())
            self._place(task)
        return backwards[::-1]

    def _next(self) -> int:
        """The task to place, removed from those that are ready."""
        if self.names:
            return self.names.pop()
        if self.ends and not self.under_way:
            chosen = min(self.ends, key=self._end_rank)
            self.ends.remove(chosen)
            return chosen
        self._bring_in(self.now)
        if not self.kinds and not self.starts:
            self._bring_in(self.pending[0][0])
        deepest = max(self.kinds, default=-1.0)
        if self.starts and (self.ends or self.depth[self.starts[-1]] > deepest):
            return self.starts.pop()
        return self._of_kind(deepest)

    def _end_rank(self, task: int) -> tuple[float, ...]:
        stall = max(0.0, self.ready_at[task] - self.now)
        return (stall, -self.depth[task], -self.alone[task], -self.position[task])

    def _bring_in(self, time: float) -> None:
        """Moves the tasks that are ready by a time to where they are chosen from."""
        while self.pending and self.pending[0][0] <= time:
            _, task = heapq.heappop(self.pending)
            if self.tasks.roles[task] == Role.START:
                self.starts.append(task)
                continue
            self._add(task)

    def _add(self, task: int) -> None:
        """Adds a task to those of its kind."""
        kind = self.kind_of[task] = (self.costs[task], self.reads_end[task], self.alone[task])
        insort(self.kinds.setdefault(self.depth[task], {}).setdefault(kind, []), (self.position[task], task))

    def _remove(self, task: int) -> None:
        """Removes a task from those of its kind."""
        kind, kinds = self.kind_of.pop(task), self.kinds[self.depth[task]]
        members = kinds[kind]
        del members[bisect_left(members, (self.position[task], task))]
        if not members:
            del kinds[kind]
        if not kinds:
            del self.kinds[self.depth[task]]

    def _of_kind(self, depth: float) -> int:
        """The task of a depth to place."""
        kinds = self.kinds[depth]
        gap = self.awaited[0] - self.now if self.awaited else None

        def rank(kind: Kind) -> tuple[float, int, int, int]:
            cost, reads_end, alone = kind
            return (0.0 if gap is None else abs(gap - cost), -reads_end, -alone, -kinds[kind][-1][0])

        _, task = kinds[min(kinds, key=rank)][-1]
        self._remove(task)
        return task

    def _place(self, task: int) -> None:
        """Places a task before all that were placed, and releases what it alone waited for."""
        tasks, role = self.tasks, self.tasks.roles[task]
        self.placed[task] = True
        self.ready_at[task] = self._from(task, self.now)
        self.now = self.ready_at[task] + self.costs[task]
        if role in (Role.START, Role.END):
            self.under_way = role == Role.END
        while self.awaited and self.awaited[0] < self.now:
            heapq.heappop(self.awaited)
        for read in sorted(tasks.reads[task], key=self.position.__getitem__):
            self.waiting[read] -= 1
            if not self.waiting[read]:
                self._release(read, self._from(read, self.now))
            elif self.waiting[read] == 1:
                self._is_awaited_alone(read)

    def _is_awaited_alone(self, read: int) -> None:
        """Counts an array for the only one of its readers that is not placed."""
        (reader,) = (reader for reader in self.tasks.readers[read] if not self.placed[reader])
        if is_ready := reader in self.kind_of:
            self._remove(reader)
        self.alone[reader] += 1
        if is_ready:
            self._add(reader)

    def _from(self, task: int, earliest: float) -> float:
        """The time from which a task may be placed, after all its readers."""
        latency = self.latencies[task] if self.tasks.roles[task] == Role.START else HOP
        return max([earliest, *(self.ready_at[reader] + latency for reader in self.tasks.readers[task])])

    def _release(self, task: int, time: float) -> None:
        """Adds a task that nothing waits for any more."""
        self.ready_at[task] = time
        if self.tasks.roles[task] == Role.NAME and task not in self.barriers:
            self.names.append(task)
        elif self.tasks.roles[task] == Role.END or task in self.sending:
            self.ends.append(task)
        else:
            heapq.heappush(self.pending, (time, task))
        if time > self.now:
            heapq.heappush(self.awaited, time)
