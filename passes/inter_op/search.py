"""The search over partitions into stages: they are simulated, in an order in which the best comes early.

Partitions come from the dynamic program, pace by pace, and then best first in the order of what they take at least.
The judge and (1) of `passes.inter_op` differ where transfers or unequal stages make 1F1B wait, or let it fill its
bubbles: the best-first search covers what the dynamic program cannot see.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np

from passes.errors import InternalError
from passes.inter_op.choices import Partition, Places, StageChoice, Statistics
from passes.inter_op.costs import Entry, Problem
from passes.inter_op.dynamic_program import Stages, frame, levels, trace
from passes.inter_op.schedule_table import build
from passes.inter_op.simulator import Timeline, Transfer, simulate

STEP = 1.1
"""Paces that share a lower bound of the step are so far apart."""

CLOSE = 1 - 1e-12
"""What is within this factor of the best is no better: bounds and simulations add in different orders."""

SLACK = 1.03
"""Partial solutions are dropped whose step by (1) is longer than the best simulated one by this factor."""


@dataclass(slots=True, kw_only=True)
class Judge:
    """Simulates partitions and keeps the best."""

    places: Places
    dispatch_seconds: float
    seconds: float = math.inf
    best: tuple[Problem, str, tuple[Entry, ...]] | None = None
    seen: set[tuple[int, str, tuple[Entry, ...]]] = field(default_factory=set[tuple[int, str, tuple[Entry, ...]]])
    asked: int = 0
    programs: int = 0
    expanded: int = 0

    def consider(self, problem: Problem, schedule: str, stages: tuple[Entry, ...]) -> None:
        """Simulates unless it is known, does not fit in memory, or bounds (2) and (3) say that it is no better."""
        key = (problem.microbatches, schedule, stages)
        counts = problem.counts(schedule, len(stages))
        fits = all(problem.costs.room[entry] >= n for entry, n in zip(stages, counts, strict=True))
        if key in self.seen or not fits or _least(problem, self.places, stages) >= self.seconds * CLOSE:
            return
        self.seen.add(key)
        seconds = self.simulate(problem, schedule, stages).seconds
        if seconds < self.seconds:
            self.seconds, self.best = seconds, (problem, schedule, stages)

    def simulate(self, problem: Problem, schedule: str, stages: tuple[Entry, ...]) -> Timeline:
        """The timeline of these stages."""
        costs = problem.costs
        return simulate(
            build(schedule, len(stages), problem.microbatches),
            [costs.candidates[entry].cost() for entry in stages],
            [
                Transfer(
                    forward_seconds=float(costs.onward[hop]),
                    backward_seconds=float(costs.back[hop]),
                )
                for hop in _hops(self.places, stages)
            ],
            dispatch_seconds=self.dispatch_seconds,
        )

    def answer(self, bound: float) -> Partition:
        """The best partition found."""
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
                asked=self.asked, programs=self.programs, simulated=len(self.seen), expanded=self.expanded
            ),
        )


def _hops(places: Places, stages: Sequence[Entry]) -> list[tuple[int, int, int, int]]:
    """The cut, the sender, the receiver and where the sender ends, of every boundary."""
    found: list[tuple[int, int, int, int]] = []
    offset = 0
    for (sender, *_), (receiver, first, _) in pairwise(stages):
        offset = int(places.ends[sender, offset])
        found.append((first, sender, receiver, offset))
    return found


def _least(problem: Problem, places: Places, stages: Sequence[Entry]) -> float:
    """Bounds (2) and (3) of a partition."""
    costs, m = problem.costs, problem.microbatches
    chain = forward = least = 0.0
    for hop, entry in zip((None, *_hops(places, stages)), stages, strict=True):
        if hop:
            chain += float(costs.there_and_back[hop])
            forward += float(costs.onward[hop])
        least = max(
            least,
            chain + m * float(costs.chain[entry]) + float(costs.finish[stages[0]]),
            forward + m * float(costs.busy[entry]) + float(costs.finish[entry]),
        )
        chain += float(costs.chain[entry])
        forward += float(costs.forward[entry])
    return least


def alone(problem: Problem, judge: Judge) -> None:
    """Considers one stage on each submesh: no pipeline."""
    for choice, ends in enumerate(judge.places.ends):
        entry = (choice, 0, problem.n_layers)
        if 1 in problem.numbers and judge.places.final[ends[0]] and entry in problem.costs.candidates:
            for schedule in problem.schedules:
                judge.consider(problem, schedule, (entry,))


def sweep(problem: Problem, judge: Judge, epsilon: float) -> None:
    """Considers the partitions with the least sum in (1) for each pace and number of stages.

    Paces rise in steps of `STEP`, and fall within one to just below that of the partitions found, by 1 + epsilon.
    """
    costs, m = problem.costs, problem.microbatches
    paces = np.unique(costs.pace[np.isfinite(costs.pace) & (costs.pace >= problem.least_pace)])
    families = problem.families(np.unique(costs.room))
    start = 0
    while start < len(paces) and m * paces[start] < judge.seconds * CLOSE:
        low = float(paces[start])
        start = int(np.searchsorted(paces, low * STEP, side="right"))
        for rooms, names in families.items():
            high = float(paces[start - 1])
            while high >= low:
                high = _program(problem, judge, rooms, names, low, high) / (1 + epsilon)


def _program(
    problem: Problem,
    judge: Judge,
    rooms: Sequence[float],
    names: Mapping[int, Sequence[str]],
    low: float,
    high: float,
) -> float:
    """Considers the partition with the least sum for each number of stages, of stages whose pace is at most `high`.

    Gives the slowest pace of those partitions, 0 for none. Paces below `low` are known.
    """
    costs, m = problem.costs, problem.microbatches
    usable = np.where(costs.pace <= high, costs.chain, math.inf)
    budget = SLACK * judge.seconds - (m - 1) * low
    usable, ceiling = frame(usable, costs.there_and_back, judge.places, budget)

    @cache
    def fitting(room: float) -> Stages:
        return Stages.of(np.where(costs.room >= room, usable, math.inf))

    def stages(level: int) -> Stages:
        return fitting(rooms[level - 1])

    program = (stages, costs.there_and_back, judge.places, np.add)
    found = levels(*program, len(rooms), ceiling)
    judge.programs += 1
    slowest = 0.0
    for n_stages in range(1, len(found) + 1):
        if n_stages in names and np.isfinite(found[n_stages - 1][:, 0, 0]).any():
            chosen = trace(*program, found[:n_stages])
            slowest = max(slowest, *(float(costs.pace[entry]) for entry in chosen))
            for schedule in names[n_stages]:
                judge.consider(problem, schedule, chosen)
    return slowest


Node = tuple[float, int, Problem, str, int, tuple[Entry, ...], int, float, float, float]
"""Bound, number, what is partitioned how into how many stages, the first of them, where their devices end, their
latencies along the chain and forward, and their own part of the bound."""


def prove(problems: Sequence[Problem], judge: Judge, most: int) -> float:
    """Considers partitions in the order of their bounds until none is left that may be better, or `most` were extended.

    Gives the least bound of what is left, at most the best seconds.
    """
    nodes: list[Node] = []
    for problem in problems:
        for schedule in problem.schedules:
            for n_stages in problem.numbers:
                nodes.append((problem.least_seconds, len(nodes), problem, schedule, n_stages, (), 0, 0.0, 0.0, 0.0))
    heapq.heapify(nodes)
    made = len(nodes)
    while nodes and nodes[0][0] < judge.seconds * CLOSE and judge.expanded < most:
        node = heapq.heappop(nodes)
        judge.expanded += 1
        if len(node[5]) == node[4]:
            judge.consider(node[2], node[3], node[5])
            continue
        for child in _extended(node, judge):
            made += 1
            heapq.heappush(nodes, (child[0], made, *child[2:]))
    return min(nodes[0][0], judge.seconds) if nodes else judge.seconds


def _extended(node: Node, judge: Judge) -> Iterator[Node]:
    """The partial partitions with one stage more that may be better than the best."""
    _, _, problem, schedule, n_stages, stages, offset, chain, forward, own = node
    costs, m, places, n_layers = problem.costs, problem.microbatches, judge.places, problem.n_layers
    needed = problem.counts(schedule, n_stages)[len(stages)]
    left = n_stages - len(stages) - 1
    before, _, first = stages[-1] if stages else (0, 0, 0)
    lasts = slice(first + 1, n_layers + 1 - left) if left else slice(n_layers, n_layers + 1)
    for choice, all_ends in enumerate(places.ends):
        end = int(all_ends[offset])
        row = (choice, first, lasts)
        start = chain + (costs.there_and_back[first, before, choice, offset] if stages else 0.0)
        ready = forward + (costs.onward[first, before, choice, offset] if stages else 0.0)
        finish = costs.finish[stages[0]] if stages else costs.finish[row]
        owns = np.maximum(start + m * costs.chain[row] + finish, ready + m * costs.busy[row] + costs.finish[row])
        owns = np.maximum(owns, own)
        chains, forwards = start + costs.chain[row], ready + costs.forward[row]
        onward = chains + problem.after_chain[choice, lasts, end] + finish
        bounds = np.maximum(np.maximum(owns, onward), forwards + problem.after_forward[choice, lasts, end])
        for index in np.flatnonzero((bounds < judge.seconds * CLOSE) & (costs.room[row] >= needed)).tolist():
            entry = (choice, first, lasts.start + index)
            sums = (float(chains[index]), float(forwards[index]), float(owns[index]))
            yield float(bounds[index]), 0, problem, schedule, n_stages, (*stages, entry), end, *sums
