"""The search over partitions into stages by simulation, in an order that finds the best early.

Partitions come from the dynamic program, period by period, and then from a best-first search in the order of their
lower bounds. The simulator and (1) of `passes.inter_op.partitions` differ where transfers or unequal stages make 1F1B
wait, or let it fill its bubbles; the best-first search covers these cases.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from passes.errors import InternalError
from passes.inter_op.choices import Candidate, Partition, Places, StageChoice, Statistics
from passes.inter_op.costs import Entry, Problem
from passes.inter_op.dynamic_program import Stages, levels, prune, trace
from passes.inter_op.makespan import NamedSchedule
from passes.inter_op.schedule_registry import build
from passes.inter_op.simulator import Timeline, Transfer, simulate

STEP = 1.1
"""Periods within this factor share one lower bound of the step: each bound takes a dynamic program of its own, and is
lower by at most this factor. It changes the work, never what is proven.
"""

EPSILON = 0.02
"""The share by which neighbouring periods differ in the search by period: what is found is at most that far from the
least of (1). The best of the simulation may be further away; the `bound` of the result says how far at most. `python -m
benchmarks.settings` shows what half and double of it find.
"""

CLOSE = 1 - 1e-12
"""The factor below which seconds count as better: bounds and simulations add in different orders."""

SLACK = 1.03
"""Partial solutions are dropped where their step by (1) exceeds the best simulated one by this factor: the formula and
the simulation differ. `tests/passes/inter_op` compares what is found with every partition that there is."""


@dataclass(slots=True, kw_only=True)
class Incumbent:
    """The best partition simulated so far, and counts of the work."""

    places: Places
    dispatch_seconds: float
    overlap: float = 1.0
    seconds: float = math.inf
    best: tuple[Problem, str, tuple[Entry, ...]] | None = None
    seen: set[tuple[int, str, tuple[Entry, ...]]] = field(default_factory=set[tuple[int, str, tuple[Entry, ...]]])
    entries: int = 0
    programs: int = 0
    expanded: int = 0

    def consider(self, problem: Problem, schedule: str, stages: tuple[Entry, ...]) -> None:
        """Simulates a partition, and keeps it if it is the fastest so far.

        Skips one that is known, that does not fit in memory, or that bounds (2) and (3) show to be no better.
        """
        key = (problem.microbatches, schedule, stages)
        counts = problem.counts(schedule, len(stages))
        fits = all(problem.costs.max_in_flight[entry] >= n for entry, n in zip(stages, counts, strict=True))
        if key in self.seen or not fits or _least(problem, self.places, stages) >= self.seconds * CLOSE:
            return
        self.seen.add(key)
        tasks = NamedSchedule(schedule, len(stages), problem.microbatches)
        seconds = tasks.seconds(*self._costs(problem, stages), self.dispatch_seconds, self.overlap)
        if seconds < self.seconds:
            self.seconds, self.best = seconds, (problem, schedule, stages)

    def simulate(self, problem: Problem, schedule: str, stages: tuple[Entry, ...]) -> Timeline:
        """The simulated timeline of a partition."""
        pipeline = build(schedule, len(stages), problem.microbatches)
        costs, hops = self._costs(problem, stages)
        return simulate(pipeline, costs, hops, dispatch_seconds=self.dispatch_seconds, overlap=self.overlap)

    def _costs(self, problem: Problem, stages: tuple[Entry, ...]) -> tuple[list[Candidate], list[Transfer]]:
        """The costs of the stages of a partition, and of the transfers between them."""
        costs = problem.costs
        hops = [
            Transfer(forward_seconds=float(costs.onward[hop]), backward_seconds=float(costs.back[hop]))
            for hop in _hops(self.places, stages)
        ]
        return [costs.candidates[entry] for entry in stages], hops

    def answer(self, bound: float) -> Partition:
        """The best partition found, with its lower bound."""
        if self.best is None:
            raise InternalError("no partition was found")
        problem, schedule, stages = self.best
        offset, choices = 0, list[StageChoice]()
        for choice, first, last in stages:
            start = int(self.places.starts[choice, offset]) * self.places.unit
            offset = self.places.ends[choice, offset]
            candidate = problem.costs.candidates[choice, first, last]
            submesh = self.places.choices[choice]
            choices.append(
                StageChoice(first=first, last=last, submesh=submesh, first_device=start, candidate=candidate)
            )
        return Partition(
            stages=tuple(choices),
            schedule=schedule,
            microbatches=problem.microbatches,
            timeline=self.simulate(problem, schedule, stages),
            bound=min(bound, self.seconds),
            statistics=Statistics(
                entries=self.entries, programs=self.programs, simulated=len(self.seen), expanded=self.expanded
            ),
        )


def _hops(places: Places, stages: Sequence[Entry]) -> list[tuple[int, int, int, int]]:
    """Every boundary of a partition, as an index of boundary arrays: its cut, sender, receiver, and the offset where
    the sender ends.
    """
    hops: list[tuple[int, int, int, int]] = []
    offset = 0
    for (sender, *_), (receiver, first, _) in pairwise(stages):
        offset = int(places.ends[sender, offset])
        hops.append((first, sender, receiver, offset))
    return hops


def _least(problem: Problem, places: Places, stages: Sequence[Entry]) -> float:
    """The greater of the lower bounds (2) and (3) of a partition, in seconds."""
    costs, m = problem.costs, problem.microbatches
    chain = forward = bound = 0.0
    for hop, entry in zip((None, *_hops(places, stages)), stages, strict=True):
        if hop:
            chain += float(costs.there_and_back[hop])
            forward += float(costs.onward[hop])
        bound = max(
            bound,
            chain + m * float(costs.chain[entry]) + float(costs.finish[stages[0]]),
            forward + m * float(costs.busy[entry]) + float(costs.finish[entry]),
        )
        chain += float(costs.chain[entry])
        forward += float(costs.forward[entry])
    return bound


def search_single_stages(problem: Problem, incumbent: Incumbent) -> None:
    """Considers every partition into a single stage."""
    for choice, ends in enumerate(incumbent.places.ends):
        entry = (choice, 0, problem.n_layers)
        if 1 in problem.numbers and incumbent.places.final[ends[0]] and entry in problem.costs.candidates:
            for schedule in problem.schedules:
                incumbent.consider(problem, schedule, (entry,))


def search_by_period(problem: Problem, incumbent: Incumbent) -> None:
    """Considers the partitions with the least sum in (1) for each period and number of stages.

    Periods rise in steps of `STEP`, and fall within one to just below that of the partitions found, by 1 + `EPSILON`.
    """
    costs, m = problem.costs, problem.microbatches
    periods = np.unique(costs.period[np.isfinite(costs.period) & (costs.period >= problem.least_period)])
    groups = problem.schedule_groups(np.unique(costs.max_in_flight))
    start = 0
    while start < len(periods) and m * periods[start] < incumbent.seconds * CLOSE:
        low = float(periods[start])
        start = int(np.searchsorted(periods, low * STEP, side="right"))
        for capacities, names in groups.items():
            high = float(periods[start - 1])
            while high >= low:
                high = _program(problem, incumbent, capacities, names, low, high) / (1 + EPSILON)


def _program(
    problem: Problem,
    incumbent: Incumbent,
    capacities: Sequence[float],
    names: Mapping[int, Sequence[str]],
    low: float,
    high: float,
) -> float:
    """Considers the partition with the least sum for each number of stages among those with a period of at most `high`.

    Returns the longest period of those partitions, 0 for none. Periods below `low` have been searched.
    """
    costs, m = problem.costs, problem.microbatches
    usable = np.where(costs.period <= high, costs.chain, math.inf)
    budget = SLACK * incumbent.seconds - (m - 1) * low
    usable, ceiling = prune(usable, costs.there_and_back, incumbent.places, budget)

    @cache
    def fitting(capacity: float) -> Stages:
        return Stages.of(np.where(costs.max_in_flight >= capacity, usable, math.inf))

    def stages(level: int) -> Stages:
        return fitting(capacities[level - 1])

    program = (stages, costs.there_and_back, incumbent.places, np.add)
    tables = levels(*program, len(capacities), ceiling)
    incumbent.programs += 1
    slowest = 0.0
    for n_stages in range(1, len(tables) + 1):
        if n_stages in names and np.isfinite(tables[n_stages - 1][:, 0, 0]).any():
            chosen = trace(*program, tables[:n_stages])
            slowest = max(slowest, *(float(costs.period[entry]) for entry in chosen))
            for schedule in names[n_stages]:
                incumbent.consider(problem, schedule, chosen)
    return slowest


class PartialPartition(NamedTuple):
    """The first stages of a partition into `n_stages`, which end at device `offset` of those that are in use.

    `bound` is a lower bound on the step of every partition that begins so, the first field since the search takes the
    least of them; `number` breaks ties. `chain_seconds` and `forward_seconds` are the sums over j in (2) and (3) of
    `passes.inter_op.partitions`, and `stages_bound` is the part of the bound that these stages alone give.
    """

    bound: float
    number: int
    problem: Problem
    schedule: str
    n_stages: int
    stages: tuple[Entry, ...] = ()
    offset: int = 0
    chain_seconds: float = 0.0
    forward_seconds: float = 0.0
    stages_bound: float = 0.0


def branch_and_bound(problems: Sequence[Problem], incumbent: Incumbent, limit: int) -> float:
    """The least step of any partition, in seconds, as far as it is proven; at most that of the incumbent.

    Goes through partial partitions in the order of their lower bounds, until none is left that may be better, or
    `limit` of them were extended.
    """
    numbers = count()
    queue = [
        PartialPartition(problem.least_seconds, next(numbers), problem, schedule, n_stages)
        for problem in problems
        for schedule in problem.schedules
        for n_stages in problem.numbers
    ]
    heapq.heapify(queue)
    while queue and queue[0].bound < incumbent.seconds * CLOSE and incumbent.expanded < limit:
        partial = heapq.heappop(queue)
        incumbent.expanded += 1
        if len(partial.stages) == partial.n_stages:
            incumbent.consider(partial.problem, partial.schedule, partial.stages)
            continue
        for extended in _extended(partial, incumbent, numbers):
            heapq.heappush(queue, extended)
    return min(queue[0].bound, incumbent.seconds) if queue else incumbent.seconds


def _extended(partial: PartialPartition, incumbent: Incumbent, numbers: Iterator[int]) -> Iterator[PartialPartition]:
    """The partial partitions with one stage more that may still beat the best."""
    _, _, problem, schedule, n_stages, stages, offset, chain, forward, bound = partial
    costs, m, places, n_layers = problem.costs, problem.microbatches, incumbent.places, problem.n_layers
    needed = problem.counts(schedule, n_stages)[len(stages)]
    remaining = n_stages - len(stages) - 1
    sender, _, first = stages[-1] if stages else (0, 0, 0)
    lasts = slice(first + 1, n_layers + 1 - remaining) if remaining else slice(n_layers, n_layers + 1)
    for choice, all_ends in enumerate(places.ends):
        end = int(all_ends[offset])
        row = (choice, first, lasts)
        start = chain + (costs.there_and_back[first, sender, choice, offset] if stages else 0.0)
        ready = forward + (costs.onward[first, sender, choice, offset] if stages else 0.0)
        finish = costs.finish[stages[0]] if stages else costs.finish[row]
        of_stages = np.maximum(start + m * costs.chain[row] + finish, ready + m * costs.busy[row] + costs.finish[row])
        of_stages = np.maximum(of_stages, bound)
        chains, forwards = start + costs.chain[row], ready + costs.forward[row]
        onward = chains + problem.after_chain[choice, lasts, end] + finish
        bounds = np.maximum(np.maximum(of_stages, onward), forwards + problem.after_forward[choice, lasts, end])
        better = bounds < incumbent.seconds * CLOSE
        for index in np.flatnonzero(better & (costs.max_in_flight[row] >= needed)).tolist():
            yield PartialPartition(
                bound=float(bounds[index]),
                number=next(numbers),
                problem=problem,
                schedule=schedule,
                n_stages=n_stages,
                stages=(*stages, (choice, first, lasts.start + index)),
                offset=end,
                chain_seconds=float(chains[index]),
                forward_seconds=float(forwards[index]),
                stages_bound=float(of_stages[index]),
            )
