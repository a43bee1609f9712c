"""The inter-operator search: layers x submeshes -> stages, as a pure function of a table of stage costs.

Stages are consecutive layers on consecutive devices: a submesh never straddles two hosts unless it is made of whole
ones. With p stages, m microbatches, and for stage i the chain seconds c_i (forward, and the backward that the stage
before waits for), the busy seconds t_i >= c_i of a microbatch, the finish seconds f_i and the transfers h_i (there and
back) to the next one, a step takes about

    sum of (c_i + h_i) + (m - 1) period,    period = max of (t_i + f_i / m)                               (1)

and, whatever the schedule, at least (with forward seconds F_i and onward transfers x_i)

    max over i of  sum over j < i of (c_j + h_j) + m c_i + f_0                                            (2)
    max over i of  sum over j < i of (F_j + x_j) + m t_i + f_i                                            (3)

1. `passes.inter_op.dynamic_program` minimises the sum in (1) for one period and every number of stages;
   `search_by_period` does so for periods a factor 1 + epsilon apart, and ends where m periods reach the best.
2. Every partition found is simulated, unless a bound shows that it is no better, and the fastest is kept: the result is
   never slower, as simulated, than any partition compared, one stage on all devices among them.
3. Where the caller has a `lower_bound` on the cost of stages, entries of the table are requested in rounds: those that
   some partition with a low bound may use, until no partition with another entry can beat the best found. The cost of
   an entry, once known, replaces its bound in later rounds.
4. `branch_and_bound` goes through all partitions in the order of their bounds (2) and (3): if it comes to the end the
   result is optimal, and otherwise the least bound that is left is the bound of the result.

Reference: Zheng et al., Alpa (2201.12023), section 5, equations 2 to 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise, product, starmap

import numpy as np

from passes.errors import OverBudgetError, PlanningError, explain
from passes.inter_op.choices import Candidate, LowerBound, Partition, Places, StageTable, Submesh, place
from passes.inter_op.costs import CostArrays, Entry, Floats, Problem, boundaries, entries, tabulate, with_bounds
from passes.inter_op.dynamic_program import Stages, bounds_with, levels, trace
from passes.inter_op.schedule_registry import is_chunked, splits_backward
from passes.inter_op.search import CLOSE, Incumbent, branch_and_bound, search_by_period, search_single_stages
from passes.progress import SearchContext
from passes.text import count, quantities

LowerBoundOf = Callable[[int, int, Submesh, int], LowerBound]
Prefetch = Callable[[Sequence[tuple[int, int, Submesh, int]], float], None]

_WIDER = 1.02
"""Entries whose bounds lie within this factor of the lowest are requested together: one at a time would leave other
processes idle, and entries far above it may never be asked for."""

_ROUNDING = 1e-9
"""The share by which equal sums of squares may differ: cuts that differ by less are equal, and the last is taken."""

EPSILON = 0.02
"""The share by which neighbouring periods differ in the search by period: what is found is at most that far from the
least of (1). Simulated, it may be further from the best of one schedule; the `bound` of the result says how far at
most. `python -m benchmarks.settings` shows what half and double of it find."""

MOST_EXTENDED = 2000
"""Partial partitions that the branch and bound at the end extends: work, about a second of one processor. It proves
small problems optimal and leaves large ones a bound. `python -m benchmarks.settings` shows what half and double do."""


def even(weights: Sequence[float], n_stages: int) -> tuple[tuple[int, int], ...]:
    """Ranges (first, last) of layers, `last` excluded, with the least possible largest sum of weights.

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
        cuts.append(int(np.flatnonzero(scores <= scores.min() * (1 + _ROUNDING))[-1]))
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
    overlap: float = 1.0,
    n_stages: Sequence[int] | None = None,
    idle: bool = True,
    epsilon: float = EPSILON,
    proof: int = MOST_EXTENDED,
    lower_bound: LowerBoundOf | None = None,
    prefetch: Prefetch | None = None,
    context: SearchContext | None = None,
) -> Partition | None:
    """The stages, schedule and number of microbatches with the shortest simulated step, if that is below the cutoff.

    Stages take devices of `whole`, which starts a host, in shapes of `choices`; some may stay `idle`. `n_stages` are
    the numbers of stages allowed, by default all. Who sends computes during the part `overlap` of a transfer.
    `memory_limit` is in bytes of one device. `proof` is the most partial partitions that the last part of the search
    extends. `lower_bound` bounds the cost of any candidate; without it every entry is requested. `prefetch` is called
    with the entries that are requested next, and the seconds that a step must stay below. The `context` has the cutoff,
    and may be interrupted. Schedules with several stages on a device group are not searched. Raises PlanningError for
    numbers that make no sense, and where no partition fits in memory.
    """
    context = context or SearchContext()
    places = place(whole, choices, idle)
    numbers = tuple(p for p in _check(n_layers, n_stages, microbatches, schedules) if p <= places.n_slots)
    splits = {name: splits_backward(name) for name in schedules}
    incumbent = Incumbent(places=places, dispatch_seconds=dispatch_seconds, overlap=overlap, seconds=context.cutoff)
    hops = {m: boundaries(n_layers, places, table, m) for m in dict.fromkeys(microbatches)}
    requests = _Requests(
        places=places,
        table=table,
        entries=tuple(entries(n_layers, places, numbers)),
        memory_limit=memory_limit,
        chained=not any(splits.values()),
        lower_bound=lower_bound,
        prefetch=prefetch,
        known={m: {} for m in hops},
        n_layers=n_layers,
    )

    def problem_of(m: int, split: bool) -> Problem:
        costs = tabulate(n_layers, places, requests.known[m], hops[m], m, split, dispatch_seconds, memory_limit)
        return with_bounds(places, costs, m, tuple(name for name in splits if splits[name] == split), numbers)

    kinds = tuple(product(hops, dict.fromkeys(splits.values())))
    problems = _searched(requests, partial(starmap, problem_of, kinds), incumbent, epsilon, context)
    incumbent.entries = sum(map(len, requests.known.values()))
    bound = 0.0 if context.is_interrupted else branch_and_bound(problems, incumbent, proof)
    if incumbent.best is None and math.isfinite(context.cutoff):
        return None
    if incumbent.best is None:
        raise _unfit(problems, places, memory_limit)
    return incumbent.answer(bound)


def _searched(
    requests: _Requests,
    posed: Callable[[], Iterable[Problem]],
    incumbent: Incumbent,
    epsilon: float,
    context: SearchContext,
) -> list[Problem]:
    """The problems once no further entries are needed, or once the search was interrupted with a partition found."""
    problems: list[Problem] = []
    with context.ending_early():
        while requests.ask(incumbent.seconds):
            problems = sorted(posed(), key=lambda problem: problem.least_seconds)
            for problem in problems:
                search_single_stages(problem, incumbent)
            for problem in problems:
                search_by_period(problem, incumbent, epsilon)
    if incumbent.best is None:
        context.raise_if_interrupted()
    return problems


@dataclass(slots=True, kw_only=True)
class _Requests:
    """The entries requested from a table so far; `chained` if all of a backward is in the chain of its stage."""

    places: Places
    table: StageTable
    entries: tuple[Entry, ...]
    n_layers: int
    memory_limit: float
    chained: bool
    lower_bound: LowerBoundOf | None
    prefetch: Prefetch | None
    known: dict[int, dict[Entry, Candidate | None]]

    def ask(self, seconds: float) -> bool:
        """Whether further entries were requested: those that a partition of less than `seconds` may need."""
        bounds = {m: self._bounds(m) for m in self.known}
        missing = [(m, e, float(bounds[m][e])) for m in bounds for e in self.entries if e not in self.known[m]]
        lowest = min((bound for _, _, bound in missing), default=math.inf)
        if not missing or (math.isfinite(seconds) and lowest >= seconds * CLOSE):
            return False
        requested = [(m, entry) for m, entry, bound in missing if bound <= lowest * _WIDER]
        runs = [(first, last, self.places.choices[choice], m) for m, (choice, first, last) in requested]
        if self.prefetch is not None:
            self.prefetch(runs, seconds)
        for (m, entry), run in zip(requested, runs, strict=True):
            self.known[m][entry] = self.table.candidate(*run, seconds / m)  # its step takes m periods or more
        return True

    def _bounds(self, m: int) -> Floats:
        """A lower bound on the step of every partition that has a given entry."""
        busy, periods = np.full((2, len(self.places.choices), self.n_layers, self.n_layers + 1), math.inf)
        for entry in self.entries:
            busy[entry], periods[entry] = self._bound(m, entry)
        if self.lower_bound is None:
            return busy
        none = np.where(np.isfinite(busy), 0.0, math.inf)
        latencies = busy if self.chained else none
        return np.maximum(bounds_with(m * busy, latencies, self.places), bounds_with(m * periods, none, self.places))

    def _bound(self, m: int, entry: Entry) -> tuple[float, float]:
        """The least seconds of a microbatch on an entry, and its least period; infinite where none fits.

        They are exact once the cost of the entry is known.
        """
        if self.lower_bound is None:
            return 0.0, 0.0
        if entry in self.known[m]:
            candidate = self.known[m][entry]
            if not candidate or candidate.needed_nbytes(1) > self.memory_limit:
                return math.inf, math.inf
            return candidate.forward_seconds + candidate.backward_seconds, candidate.period(m)
        choice, first, last = entry
        bound = self.lower_bound(first, last, self.places.choices[choice], m)
        return (bound.seconds, bound.period) if bound.nbytes <= self.memory_limit else (math.inf, math.inf)


def _check(
    n_layers: int, n_stages: Sequence[int] | None, microbatches: Sequence[int], schedules: Sequence[str]
) -> tuple[int, ...]:
    """The numbers of stages to try. Raises PlanningError for numbers that make no sense, and chunked schedules."""
    for m in microbatches or [0]:
        if m < 1:
            argument = f"microbatches={m}" if microbatches else "microbatches=()"
            raise PlanningError(explain(argument, "a step has at least 1 microbatch", "", "give numbers from 1"))
    if not schedules:
        raise PlanningError(explain("schedules=()", "stages need a schedule", "", "name one, such as '1f1b'"))
    for name in schedules:
        if is_chunked(name):
            rule = "puts several stages on a device group, and the search gives each its own"
            raise PlanningError(explain(f"schedule {name!r}", rule, "", "try '1f1b', or plan it by hand"))
    return _check_stages(n_layers, range(1, n_layers + 1) if n_stages is None else n_stages)


def _check_stages(n_layers: int, n_stages: Sequence[int]) -> tuple[int, ...]:
    """The numbers of stages, sorted and distinct. Raises PlanningError unless every stage gets a layer."""
    for number in n_stages or [0]:
        if not 1 <= number <= n_layers:
            rule = f"each needs a layer, and there are {n_layers}" if number > 0 else "a plan has at least 1 stage"
            remedy = f"ask for {n_layers} or fewer" if n_layers > 1 else "ask for 1"
            raise PlanningError(explain(f"n_stages={number}", rule, "", remedy))
    return tuple(sorted(set(n_stages)))


def _unfit(problems: Sequence[Problem], places: Places, memory_limit: float) -> OverBudgetError:
    """The error that names the partition that needs the least memory."""
    least, closest = math.inf, "no stages that cover the layers and the devices can be had"
    for problem in problems:
        costs = problem.costs
        for counts, names in problem.schedule_groups(np.arange(0.0)).items():

            @cache
            def needs(level: int, costs: CostArrays = costs, counts: Sequence[float] = counts) -> Stages:
                return Stages.of(costs.base_nbytes + counts[level - 1] * costs.in_flight_nbytes)

            program = (needs, np.zeros_like(costs.onward), places, np.maximum)
            tables = levels(*program, len(counts), np.full((problem.n_layers + 1, len(places.final)), math.inf))
            for n_stages, level in enumerate(tables, 1):
                if n_stages not in names or not level[:, 0, 0].min() < least:
                    continue
                stages = trace(*program, tables[:n_stages])
                sizes = [float(needs(n_stages - index).values[entry]) for index, entry in enumerate(stages)]
                least = max(sizes)
                worst = sizes.index(least)
                choice, first, last = stages[worst]
                flying = count(int(counts[n_stages - worst - 1]), "microbatch", "microbatches")
                closest = (
                    f"closest is {names[n_stages][0]} of {count(problem.microbatches, 'microbatch', 'microbatches')}: "
                    f"stage {worst} of {n_stages}, layers {first} to {last - 1} on {places.choices[choice]}, "
                    f"needs {least:.0f} bytes ({quantities.nbytes(least)}) with {flying} in flight"
                )
    if not math.isfinite(least):
        return OverBudgetError(
            explain("the table of stages", closest, "", "allow more submeshes, idle devices or stages")
        )
    limit = f"memory_limit={memory_limit:.0f} bytes ({quantities.nbytes(memory_limit)})"
    remedy = "give more memory or devices, more microbatches, or a schedule with fewer of them in flight"
    return OverBudgetError(explain(limit, "no partition fits", closest, remedy))
