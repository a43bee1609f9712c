"""The seconds and peak bytes of a schedule without a timeline, for searches that compare thousands of partitions.

Tasks are numbers here: which results a task needs, which it makes, and whose seconds it takes. The results are those of
`passes.inter_op.simulator`, which also says when each task runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from passes.errors import InternalError
from passes.inter_op.costs import FORMULAS, in_flight_counts
from passes.inter_op.schedule_registry import SCHEDULES, Builder, build
from passes.inter_op.schedules import LETTERS, MADE, NOTHING, Kind, Schedule
from passes.inter_op.simulator import StageCost, Transfer, hops_of, peaks_of

Integers = NDArray[np.int64]

_KINDS: tuple[Kind, ...] = tuple(LETTERS)
_KEPT = 4
"""Schedules kept as numbers: a search asks for those of one shape, under each name, again and again."""

_ROUNDS = 4
"""Rounds after which an interleaved schedule has had the most in flight: two warm up, and all others are alike."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskNumbers:
    """The tasks of each group of a schedule in order [groups][tasks].

    `tasks` are (result of its own stage, result of a neighbour, its own result, its kind and stage) of each; results
    are numbered as `passes.inter_op.schedules` numbers them. `stages` are those of the tasks, `live` is 1 for what
    begins to be in flight with a task, -1 for what no longer is after it, and 0.
    """

    n_stages: int
    n_results: int
    kinds: frozenset[Kind]
    tasks: tuple[tuple[tuple[int, int, int, int], ...], ...]
    stages: tuple[Integers, ...]
    live: tuple[Integers, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> TaskNumbers:
        """The tasks of a schedule."""
        columns = [_columns(schedule, group) for group in range(len(schedule.groups))]
        signs = np.array([1, -1, 0, -1], dtype=np.int64)
        live: list[Integers] = [np.take(signs, kind) for kind, _, _ in columns]
        return cls(
            n_stages=schedule.n_stages,
            n_results=3 * schedule.n_stages * schedule.microbatches,
            kinds=frozenset(task.kind for tasks in schedule.groups for task in tasks),
            tasks=tuple(_numbered(schedule, *group) for group in columns),
            stages=tuple(stage for _, stage, _ in columns),
            live=tuple(live),
        )

    def in_flight(self, each: Sequence[int]) -> list[int]:
        """The most in flight on each group [groups], as `schedules.in_flight` computes it with `each` [stages]."""
        nbytes = np.array(each, dtype=np.int64)
        pairs = zip(self.stages, self.live, strict=True)
        return [max(0, int(np.cumsum(nbytes[stages] * live).max())) for stages, live in pairs]

    def seconds(
        self,
        costs: Sequence[StageCost],
        transfers: Sequence[Transfer],
        dispatch_seconds: float = 0.0,
        overlap: float = 1.0,
    ) -> float:
        """Seconds of the step, as `simulate` computes them."""
        groups, n_stages = range(len(self.tasks)), self.n_stages
        hops = hops_of(transfers if len(groups) > 1 else (), n_stages)
        spent = [dispatch_seconds + cost.seconds(k) if k in self.kinds else 0.0 for k in _KINDS for cost in costs]
        on_the_way = [seconds for kind in _KINDS for seconds in hops[kind]]
        sending = [(1.0 - overlap) * seconds for seconds in on_the_way]
        ends = [-1.0] * self.n_results + [0.0]
        arrivals = ends.copy()
        free, done, at = [0.0] * len(groups), [0.0] * len(groups), [0] * len(groups)
        waiting: dict[int, list[int]] = {}
        ready = list(groups)
        while ready:
            group = ready.pop()
            now, tasks = free[group], self.tasks[group]
            for position in range(at[group], len(tasks)):
                producer, sender, result, number = tasks[position]
                if ends[producer] < 0.0 or arrivals[sender] < 0.0:
                    waiting.setdefault(producer if ends[producer] < 0.0 else sender, []).append(group)
                    at[group] = position
                    break
                now = max(now, ends[producer], arrivals[sender]) + spent[number]
                ends[result] = done[group] = now
                arrivals[result] = now + on_the_way[number]
                now += sending[number]
                if result in waiting:
                    ready += waiting.pop(result)
            else:
                at[group] = len(tasks)
            free[group] = now
        if any(position < len(tasks) for position, tasks in zip(at, self.tasks, strict=True)):
            raise InternalError("a schedule that was registered does not come to an end")
        return max(done[group] + sum(cost.finish_seconds for cost in costs[group :: len(groups)]) for group in groups)


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule by its name and sizes; its tasks are listed only when they are needed, as most are ruled out by what
    is in flight.
    """

    name: str
    n_stages: int
    microbatches: int
    chunks: int = 1

    def in_flight(self, each: Sequence[int]) -> list[int]:
        """The most in flight on each group [groups], as `schedules.in_flight` computes it with `each` [stages]."""
        if self.chunks == 1 and self.name in FORMULAS:
            counts = in_flight_counts(self.name, self.n_stages, self.microbatches)
            return [count * size for count, size in zip(counts, each, strict=True)]
        microbatches = self.microbatches
        if self.name == "interleaved":  # its rounds are alike: as much is in flight in few of them as in many
            microbatches = min(microbatches, _ROUNDS * self.n_stages // self.chunks)
        return self._numbers(microbatches).in_flight(each)

    def seconds(
        self,
        costs: Sequence[StageCost],
        transfers: Sequence[Transfer],
        dispatch_seconds: float = 0.0,
        overlap: float = 1.0,
    ) -> float:
        """Seconds of the step, as `simulate` computes them."""
        return self._numbers(self.microbatches).seconds(costs, transfers, dispatch_seconds, overlap)

    def peak_nbytes(self, costs: Sequence[StageCost]) -> int:
        """Peak bytes of the device that needs the most, as the timeline has them."""
        each = self.in_flight([cost.in_flight_nbytes for cost in costs])
        return max(sum(causes.values()) for causes in peaks_of(each, costs))

    def _numbers(self, microbatches: int) -> TaskNumbers:
        return _built(SCHEDULES[self.name], self.name, self.n_stages, microbatches, self.chunks)


@lru_cache(_KEPT)
def _built(builder: Builder, name: str, stages: int, microbatches: int, chunks: int) -> TaskNumbers:
    """The tasks of a schedule as numbers; `builder` is the function under that name, and part of the cache's key."""
    del builder
    return TaskNumbers.of(build(name, stages, microbatches, chunks))


def _columns(schedule: Schedule, group: int) -> tuple[Integers, Integers, Integers]:
    """The kinds, stages and microbatches of a group's tasks [tasks]."""
    tasks, numbers = schedule.groups[group], {kind: number for number, kind in enumerate(_KINDS)}
    kinds = np.fromiter((numbers[task.kind] for task in tasks), np.int64, len(tasks))
    stages = np.fromiter((task.stage for task in tasks), np.int64, len(tasks))
    return kinds, stages, np.fromiter((task.microbatch for task in tasks), np.int64, len(tasks))


def _numbered(
    schedule: Schedule, kinds: Integers, stages: Integers, microbatches: Integers
) -> tuple[tuple[int, int, int, int], ...]:
    """(needed of its own stage, needed of a neighbour, made, kind and stage) of each task."""
    width, height = schedule.microbatches, schedule.n_stages * schedule.microbatches
    output = stages * width + microbatches
    gradient = output + height
    is_forward, is_weight = kinds == _KINDS.index("forward"), kinds == _KINDS.index("weight_gradient")
    made = output + np.array([MADE[kind] for kind in _KINDS])[kinds] * height
    produced = np.where(is_forward, NOTHING, np.where(is_weight, gradient, output))
    before = np.where(stages > 0, output - width, NOTHING)
    after = np.where((stages + 1 < schedule.n_stages) & ~is_weight, gradient + width, NOTHING)
    received = np.where(is_forward, before, after)
    columns = (produced, received, made, kinds * schedule.n_stages + stages)
    return tuple(zip(*(column.tolist() for column in columns), strict=True))
