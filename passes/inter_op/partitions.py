"""The inter-operator search: layers x submeshes -> stages, as a pure function of a table of stage costs.

Stages are consecutive layers on consecutive devices: a submesh never straddles two hosts unless it is made of whole
ones. With p stages, m microbatches, and for stage i the chain seconds c_i (forward, and the backward that the stage
before waits for), the busy seconds t_i >= c_i of a microbatch, the finish seconds f_i and the transfers h_i (there and
back) to the next one, a step takes about

    sum of (c_i + h_i) + (m - 1) pace,    pace = max of (t_i + f_i / m)                                   (1)

and, whatever the schedule, at least (with forward seconds F_i and onward transfers x_i)

    max over i of  sum over j < i of (c_j + h_j) + m c_i + f_0                                            (2)
    max over i of  sum over j < i of (F_j + x_j) + m t_i + f_i                                            (3)

1. `passes.inter_op.dynamic_program` minimises the sum in (1) for one pace and every number of stages; `sweep` does so
for paces a
   factor 1 + epsilon apart, and ends where m paces reach the best.
2. Every partition found is simulated, unless a bound shows that it is no better: the simulator is the judge, so the
   answer is never slower in it than any partition compared, one stage on all devices among them.
3. Where the caller knows what stages take at `least`, entries of the table are asked for in rounds: those that some
   partition with a low bound may use, until no partition with another entry can be better than the best found. What an
   entry was found to cost takes the place of its least in later rounds.
4. `prove` goes best first through all partitions in the order of (2) and (3): the answer is optimal where it comes to
   the end, and otherwise the least bound left is given.

Reference: Zheng et al., Alpa (2201.12023), section 5, equations 2 to 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, product

import numpy as np

from passes.errors import OverBudgetError, PlanningError, explain
from passes.inter_op.choices import Candidate, Floor, Partition, Places, StageTable, Submesh, place, submeshes
from passes.inter_op.costs import Costs, Entry, Floats, Problem, boundaries, entries, pose, tabulate
from passes.inter_op.dynamic_program import Stages, levels, trace, with_each
from passes.inter_op.schedule_table import build, is_chunked
from passes.inter_op.search import CLOSE, Judge, alone, prove, sweep
from passes.text import count, quantities

Least = Callable[[int, int, Submesh, int], Floor]
Expect = Callable[[Sequence[tuple[int, int, Submesh, int]]], None]

_WIDER = 1.02
"""Entries are asked for together whose bounds lie within this factor of the lowest."""

__all__ = ["Candidate", "Partition", "StageTable", "Submesh", "even", "partition", "submeshes"]


def even(weights: Sequence[float], n_stages: int) -> tuple[tuple[int, int], ...]:
    """Layers cut into ranges (first, last), `last` excluded, with the least possible largest sum of weights.

    Of those cuts, one with the least sum of squares. Raises PlanningError for more stages than layers.
    """
    n_layers = len(weights)
    _check_stages(n_layers, [n_stages])
    sums = np.array([0.0, *accumulate(weights)])
    spans = np.where(np.tri(n_layers, n_layers + 1, dtype=bool), math.inf, sums - sums[:-1, None])
    levels = [np.where(np.arange(n_layers + 1) < n_layers, math.inf, 0.0)]
    for _ in range(n_stages):
        levels.append(np.append(np.maximum(spans, levels[-1]).min(1), math.inf))
    squares = np.where(spans <= levels[-1][0], spans**2, math.inf)
    levels = levels[:1]
    for _ in range(n_stages):
        levels.append(np.append((squares + levels[-1]).min(1), math.inf))
    cuts = [0]
    for onward in levels[-2::-1]:
        scores = squares[cuts[-1]] + onward
        cuts.append(int(np.flatnonzero(scores <= scores.min() * (1 + 1e-9))[-1]))
    return tuple(pairwise(cuts))


def partition(
    n_layers: int,
    whole: Submesh,
    choices: Sequence[Submesh],
    table: StageTable,
    *,
    schedules: Sequence[str] = ("gpipe", "1f1b"),
    microbatches: Sequence[int] = (1,),
    memory_limit: float = math.inf,
    dispatch_seconds: float = 0.0,
    n_stages: Sequence[int] | None = None,
    idle: bool = True,
    epsilon: float = 0.02,
    proof: int = 2000,
    beneath: float = math.inf,
    least: Least | None = None,
    expect: Expect | None = None,
    interruptible: bool = False,
) -> Partition | None:
    """The stages, schedule and number of microbatches whose simulated step is the shortest; None if none is `beneath`.

    Stages take devices of `whole`, which starts a host, in shapes of `choices`; some may stay `idle`. `n_stages` are
    the numbers of stages allowed, by default all. `memory_limit` is in bytes of one device. `proof` is the most
    partial partitions that the last part of the search extends. `least` is what no candidate goes below; without it
    every entry is asked for. `expect` hears of the entries that are asked for next. If `interruptible`, Ctrl-C
    ends the search as soon as there is a partition. Schedules with several stages on a device group are not searched.
    Raises PlanningError for numbers that make no sense, and where no partition fits in memory.
    """
    numbers = _check(n_layers, n_stages, microbatches, schedules)
    places = place(whole, choices, idle)
    numbers = tuple(p for p in numbers if p <= places.n_slots)
    splits = {name: any(task.kind == "weight_gradient" for task in build(name, 1, 1).groups[0]) for name in schedules}
    judge = Judge(places=places, dispatch_seconds=dispatch_seconds, seconds=beneath)
    counts, problems = tuple(dict.fromkeys(microbatches)), list[Problem]()
    hops = {m: boundaries(n_layers, places, table, m) for m in counts}
    wanted = _Wanted(
        places=places,
        table=table,
        entries=tuple(entries(n_layers, places, numbers)),
        memory_limit=memory_limit,
        chained=not any(splits.values()),
        least=least,
        expect=expect,
        known={m: {} for m in counts},
        n_layers=n_layers,
    )
    interrupted = False
    try:
        while wanted.ask(judge.seconds):
            problems.clear()
            for m, split in product(counts, dict.fromkeys(splits.values())):
                candidates = wanted.known[m]
                costs = tabulate(n_layers, places, candidates, hops[m], m, split, dispatch_seconds, memory_limit)
                names = tuple(name for name in splits if splits[name] == split)
                problems.append(pose(places, costs, m, names, numbers))
            problems.sort(key=lambda problem: problem.least_seconds)
            for problem in problems:
                alone(problem, judge)
            for problem in problems:
                sweep(problem, judge, epsilon)
    except KeyboardInterrupt:
        if not interruptible or judge.best is None:
            raise
        interrupted = True
    judge.asked = sum(map(len, wanted.known.values()))
    bound = 0.0 if interrupted else prove(problems, judge, proof)
    if judge.best is None and math.isfinite(beneath):
        return None
    if judge.best is None:
        raise _unfit(problems, places, memory_limit)
    return replace(judge.answer(bound), interrupted=interrupted)


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """The entries that were asked of a table, and those left; `chained` if all of a backward is in its chain."""

    places: Places
    table: StageTable
    entries: tuple[Entry, ...]
    n_layers: int
    memory_limit: float
    chained: bool
    least: Least | None
    expect: Expect | None
    known: dict[int, dict[Entry, Candidate | None]]

    def ask(self, seconds: float) -> bool:
        """Asks for entries of partitions that may take less than `seconds`; says whether there were any."""
        bounds = {m: self._bounds(m) for m in self.known}
        left = [(m, e, float(bounds[m][e])) for m in bounds for e in self.entries if e not in self.known[m]]
        lowest = min((bound for _, _, bound in left), default=math.inf)
        if not left or (math.isfinite(seconds) and lowest >= seconds * CLOSE):
            return False
        asked = [(m, entry) for m, entry, bound in left if bound <= lowest * _WIDER]
        runs = [(first, last, self.places.choices[choice], m) for m, (choice, first, last) in asked]
        if self.expect is not None:
            self.expect(runs)
        for (m, entry), run in zip(asked, runs, strict=True):
            self.known[m][entry] = self.table.candidate(*run)
        return True

    def _bounds(self, m: int) -> Floats:
        """Seconds of a step below which no partition with an entry stays."""
        floors, paces = np.full((2, len(self.places.choices), self.n_layers, self.n_layers + 1), math.inf)
        for entry in self.entries:
            floors[entry], paces[entry] = self._floor(m, entry)
        if self.least is None:
            return floors
        none = np.where(np.isfinite(floors), 0.0, math.inf)
        latencies = floors if self.chained else none
        return np.maximum(with_each(m * floors, latencies, self.places), with_each(m * paces, none, self.places))

    def _floor(self, m: int, entry: Entry) -> tuple[float, float]:
        """The least seconds of a microbatch, without and with its share of the end; infinite where none fits.

        What an entry takes once it is known.
        """
        if self.least is None:
            return 0.0, 0.0
        if entry in self.known[m]:
            found = self.known[m][entry]
            if not found or found.needed_nbytes(1) > self.memory_limit:
                return math.inf, math.inf
            return found.forward_seconds + found.backward_seconds, found.pace(m)
        choice, first, last = entry
        least = self.least(first, last, self.places.choices[choice], m)
        return (least.seconds, least.pace) if least.nbytes <= self.memory_limit else (math.inf, math.inf)


def _check(
    n_layers: int, n_stages: Sequence[int] | None, microbatches: Sequence[int], schedules: Sequence[str]
) -> tuple[int, ...]:
    """The numbers of stages to try. Raises PlanningError for numbers that make no sense, and chunked schedules."""
    for m in microbatches or [0]:
        if m < 1:
            what = f"microbatches={m}" if microbatches else "microbatches=()"
            raise PlanningError(explain(what, "a step has at least 1 microbatch", "", "give numbers from 1"))
    if not schedules:
        raise PlanningError(explain("schedules=()", "stages need a schedule", "", "name one, such as '1f1b'"))
    for name in schedules:
        if is_chunked(name):
            rule = "puts several stages on a device group, and the search gives each its own"
            raise PlanningError(explain(f"schedule {name!r}", rule, "", "try '1f1b', or plan it by hand"))
    return _check_stages(n_layers, range(1, n_layers + 1) if n_stages is None else n_stages)


def _check_stages(n_layers: int, n_stages: Sequence[int]) -> tuple[int, ...]:
    """The numbers of stages in order. Raises PlanningError unless every stage gets a layer."""
    for number in n_stages or [0]:
        if not 1 <= number <= n_layers:
            rule = f"each needs a layer, and there are {n_layers}" if number > 0 else "a plan has at least 1 stage"
            remedy = f"ask for {n_layers} or fewer" if n_layers > 1 else "ask for 1"
            raise PlanningError(explain(f"n_stages={number}", rule, "", remedy))
    return tuple(sorted(set(n_stages)))


def _unfit(problems: Sequence[Problem], places: Places, memory_limit: float) -> OverBudgetError:
    """The error that names the partition that needs the least memory."""
    least, what = math.inf, "no stages that cover the layers and the devices can be had"
    for problem in problems:
        costs = problem.costs
        for counts, names in problem.families(np.arange(0.0)).items():

            @cache
            def needs(level: int, costs: Costs = costs, counts: Sequence[float] = counts) -> Stages:
                return Stages.of(costs.base + counts[level - 1] * costs.each)

            program = (needs, np.zeros_like(costs.onward), places, np.maximum)
            found = levels(*program, len(counts), np.full((problem.n_layers + 1, len(places.final)), math.inf))
            for n_stages, level in enumerate(found, 1):
                if n_stages not in names or not level[:, 0, 0].min() < least:
                    continue
                stages = trace(*program, found[:n_stages])
                sizes = [float(needs(n_stages - index).values[entry]) for index, entry in enumerate(stages)]
                least = max(sizes)
                worst = sizes.index(least)
                choice, first, last = stages[worst]
                flying = count(int(counts[n_stages - worst - 1]), "microbatch", "microbatches")
                what = (
                    f"closest is {names[n_stages][0]} of {count(problem.microbatches, 'microbatch', 'microbatches')}: "
                    f"stage {worst} of {n_stages}, layers {first} to {last - 1} on {places.choices[choice]}, "
                    f"needs {least:.0f} bytes ({quantities.nbytes(least)}) with {flying} in flight"
                )
    if not math.isfinite(least):
        return OverBudgetError(explain("the table of stages", what, "", "allow more submeshes, idle devices or stages"))
    limit = f"memory_limit={memory_limit:.0f} bytes ({quantities.nbytes(memory_limit)})"
    remedy = "give more memory or devices, more microbatches, or a schedule with fewer of them in flight"
    return OverBudgetError(explain(limit, "no partition fits", what, remedy))
