"""Pipeline schedules: the order in which every device group runs its tasks.

A device group runs its tasks one after another; results make tasks of different groups wait for each other. With p
groups of v stages each, m microbatches, and stages that take equal seconds F, B, W (forward, and the halves of the
backward), the idle time over the ideal time m (F + B + W) v of a group is

    gpipe, one_f_one_b   (p - 1) / m
    eager_one_f_one_b    (p - 1) / m                              where F <= B + W
    interleaved          (p - 1) / (m v)
    zero_bubble_h1       (p - 1) (F + B - W) / (m (F + B + W))    where m >= p and W <= F = B; p - 1 over 3 m if equal

and at most so many pairs of a stage and a microbatch are in flight on group i (`in_flight`):

    gpipe                m
    one_f_one_b          min(m, p - i)
    eager_one_f_one_b    min(m, 2 (p - i) - 1)
    interleaved          min(m v, p (v - 1) + 2 (p - i) - 1)
    zero_bubble_h1       min(m, p)
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.errors import PlanningError, explain
from passes.text import count, wrap

Kind = Literal["forward", "backward", "input_gradient", "weight_gradient"]
"""The work of a task; `backward` is both gradients at once, the other two are its halves."""

LETTERS: Mapping[Kind, str] = {"forward": "F", "backward": "B", "input_gradient": "B", "weight_gradient": "W"}
"""The letter of each kind in drawings; a B is the backward that the stage before waits for, whole or half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kind of work of one stage for one microbatch, both numbered from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} of microbatch {self.microbatch} on stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A task with its start and end, in seconds from the start of the step."""

    task: Task
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The tasks of each device group in order [groups, tasks]; stage s lives on group s % groups."""

    name: str
    n_stages: int
    microbatches: int
    groups: tuple[tuple[Task, ...], ...]

    @property
    def chunks(self) -> int:
        """Stages on each group."""
        return self.n_stages // len(self.groups)

    def group_of(self, stage: int) -> int:
        """The group that a stage lives on."""
        return stage % len(self.groups)

    def verify(self) -> None:
        """Raises PlanningError unless the schedule is complete, every task is on its group, and no task waits forever.

        Complete: every stage has for every microbatch its forward and its backward, or both halves of it, exactly once.
        A schedule that ends has its tasks in a right order: none ran before those whose results it needs.
        """
        if not self.groups or min(self.n_stages, self.microbatches) < 1 or self.n_stages % len(self.groups):
            groups = count(len(self.groups), "device group")
            rule = f"it must have a microbatch, and as many stages on each of its {groups}"
            raise self._wrong(rule, "", "give every group the same number of stages, at least 1")
        self._verify_places()
        self._verify_complete()
        play(self)

    def _verify_places(self) -> None:
        for group, tasks in enumerate(self.groups):
            for task in tasks:
                if not (0 <= task.stage < self.n_stages and 0 <= task.microbatch < self.microbatches):
                    raise self._wrong(f"group {group} has the {task}", "there is no such thing", "number both from 0")
                if self.group_of(task.stage) != group:
                    home = self.group_of(task.stage)
                    place = f"stage {task.stage} lives on group {home}"
                    raise self._wrong(f"group {group} has the {task}", place, f"move it to group {home}")

    def _verify_complete(self) -> None:
        times = Counter((task.kind, task.stage, task.microbatch) for tasks in self.groups for task in tasks)
        for stage in range(self.n_stages):
            for microbatch in range(self.microbatches):
                counts = {kind: times[kind, stage, microbatch] for kind in LETTERS}
                if tuple(counts.values()) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                    has = " and ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in counts.items() if n) or "nothing"
                    rule = f"stage {stage} has {has} for microbatch {microbatch}"
                    remedy = "schedule 1 forward, and 1 backward or 1 input gradient and 1 weight gradient"
                    raise self._wrong(rule, f"on group {self.group_of(stage)}", remedy)

    def _wrong(self, rule: str, context: str, remedy: str) -> PlanningError:
        return PlanningError(explain(f"schedule {self}", rule, context, remedy))

    def format(self, width: int = 80) -> str:
        """The tasks of each group: `F3` is the forward of microbatch 3; `F3/5`, on stage 5 of several on the group."""
        lines = [str(self)]
        for group, tasks in enumerate(self.groups):
            label = f"  group {group}  "
            text = " ".join(self.label(task) for task in tasks)
            rows = wrap(text, width - len(label))
            lines += [(" " * len(label) if row else label) + part for row, part in enumerate(rows)]
        return "\n".join(lines)

    def label(self, task: Task) -> str:
        """A task in a few characters."""
        return f"{LETTERS[task.kind]}{task.microbatch}" + (f"/{task.stage}" if self.chunks > 1 else "")

    def __str__(self) -> str:
        microbatches = count(self.microbatches, "microbatch", "microbatches")
        return f"{self.name} of {count(self.n_stages, 'stage')} and {microbatches}"


def play(
    schedule: Schedule,
    seconds: Callable[[Task], float] = lambda task: 1.0,
    hop: Callable[[Task], float] = lambda task: 0.0,
    *,
    overlap: float = 1.0,
) -> tuple[Span, ...]:
    """Every task with its times, in order of start, ties by stage: tasks can be issued one by one in this order.

    A task starts when its group is free and its data is there. `hop` gives the seconds that a task's result takes to
    the neighbouring stage; of them the sending group computes during the part `overlap`. Raises PlanningError,
    naming the tasks, where tasks wait for each other or for one that no group has.
    """
    ends = [math.nan] * (3 * schedule.n_stages * schedule.microbatches) + [0.0]
    arrivals = ends.copy()
    free, at = [0.0] * len(schedule.groups), [0] * len(schedule.groups)
    waiting: dict[int, list[int]] = {}
    queue: list[tuple[float, int, int, Task]] = []
    spans: list[Span] = []

    def enqueue(group: int) -> None:
        if at[group] == len(schedule.groups[group]):
            return
        task = schedule.groups[group][at[group]]
        needed, received = _needs(schedule, task)
        if math.isnan(ends[needed]):
            waiting.setdefault(needed, []).append(group)
        elif math.isnan(arrivals[received]):
            waiting.setdefault(received, []).append(group)
        else:
            start = max(free[group], ends[needed], arrivals[received])
            heapq.heappush(queue, (start, task.stage, group, task))

    for group in range(len(schedule.groups)):
        enqueue(group)
    while queue:
        start, _, group, task = heapq.heappop(queue)
        result = _made(schedule, task)
        ends[result] = end = start + seconds(task)
        arrivals[result] = arrival = end + hop(task)
        free[group] = end + (1 - overlap) * (arrival - end)
        at[group] += 1
        spans.append(Span(task=task, start_seconds=start, end_seconds=end))
        enqueue(group)
        for woken in waiting.pop(result, ()):
            enqueue(woken)
    if len(spans) < sum(map(len, schedule.groups)):
        raise _stuck(schedule, at)
    return tuple(spans)


def in_flight(schedule: Schedule, each: Sequence[int] = ()) -> tuple[int, ...]:
    """The largest number of (stage, microbatch) pairs in flight on each group [groups].

    A pair counts from its forward to its backward, or to its weight gradient, as `each` [stages] of its stage, by
    default 1.
    """
    weights = each or (1,) * schedule.n_stages
    return tuple(_peak(tasks, weights) for tasks in schedule.groups)


def _peak(tasks: Sequence[Task], weights: Sequence[int]) -> int:
    live = peak = 0
    for task in tasks:
        if task.kind == "forward":
            live += weights[task.stage]
            peak = max(peak, live)
        elif task.kind != "input_gradient":
            live -= weights[task.stage]
    return peak


MADE: Mapping[Kind, int] = {"forward": 0, "backward": 1, "input_gradient": 1, "weight_gradient": 2}
NOTHING = -1
"""The numbers of results: outputs, then gradients of inputs, then of weights [3, stages, microbatches]; -1 is none."""


def _made(schedule: Schedule, task: Task) -> int:
    """The number of the result of a task."""
    return (MADE[task.kind] * schedule.n_stages + task.stage) * schedule.microbatches + task.microbatch


def _needs(schedule: Schedule, task: Task) -> tuple[int, int]:
    """The numbers of the results that a task needs: of its own stage, and of a neighbouring one."""
    n_stages, microbatches = schedule.n_stages, schedule.microbatches
    output = task.stage * microbatches + task.microbatch
    gradient = output + n_stages * microbatches
    if task.kind == "forward":
        return NOTHING, output - microbatches if task.stage else NOTHING
    if task.kind == "weight_gradient":
        return gradient, NOTHING
    return output, gradient + microbatches if task.stage + 1 < n_stages else NOTHING


def _stuck(schedule: Schedule, at: Sequence[int]) -> PlanningError:
    """The error that names the tasks that wait for each other, given each group's position."""
    lists = list(zip(at, schedule.groups, strict=True))
    results = {NOTHING, *(_made(schedule, task) for position, tasks in lists for task in tasks[:position])}
    group = next(group for group, (position, tasks) in enumerate(lists) if position < len(tasks))
    chain: dict[int, str] = {}
    while group not in chain and at[group] < len(schedule.groups[group]):
        task = schedule.groups[group][at[group]]
        needed = next(need for need in _needs(schedule, task) if need not in results)
        result_kind, stage = divmod(needed // schedule.microbatches, schedule.n_stages)
        kind = ("forward", "backward")[result_kind]
        chain[group] = f"group {group} is at the {task}, which waits for its {kind} on stage {stage}"
        group = schedule.group_of(stage)
    started = list(chain).index(group) if group in chain else 0
    context = ";\n  ".join(list(chain.values())[started:])
    remedy = "put every task behind those whose results it needs, on every group in the same order"
    return PlanningError(explain(f"schedule {schedule}", "tasks wait for each other", context, remedy))
