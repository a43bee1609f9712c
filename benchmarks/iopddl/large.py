"""One strategy per node of a graph with tens of thousands of nodes, within a limit of memory, and how good it is.

    reduce     a smaller problem of the same optimum                                      (`reductions`)
    bound      prices for bytes at every time; messages and mini-buckets at these prices  (`message_passing`,
               `mini_buckets`)
    propose    the choices that these lead to; all but a few nodes of a choice, or those around one node of it, at
               their optimum under prices                                                 (`elimination`,
               `local_search`)
    combine    the best mixture of the best choice and a proposal that fits               (`recombination`)
    finish     an integer program, where it is small                                      (`exact`)

Prices follow a subgradient: they rise where the choice at these prices overflows and fall where it leaves room, by
steps that aim at a level above the best bound. Where steps gain nothing, the level comes closer, and prices and
messages return to the best ones. The bound holds at any prices and messages, and an answer always fits: out of time is
a wider gap.

Reference: Held, Wolfe and Crowder, Validation of subgradient optimization (Mathematical Programming 1974), with the
target level of Goffin and Kiwiel (Mathematical Programming 1999).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from benchmarks.iopddl import exact
from benchmarks.iopddl.companion import Companion
from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices
from benchmarks.iopddl.local_search import LocalSearch
from benchmarks.iopddl.message_passing import Messages
from benchmarks.iopddl.mini_buckets import MiniBuckets
from benchmarks.iopddl.reductions import Reduction, reduce
from passes.errors import NoLegalPlanError, PlanningError

# Chosen; what half and double of them do is not recorded.

_TINY_PROGRAM, _SMALL_PROGRAM = 20_000, 1_000_000
"""Non-zeros up to which the integer program of the whole is solved first, or once the search is stale."""

_STALE_ROUNDS = 30
"""Rounds without a better choice after which the search is stale."""

_FIRST_LEVEL, _LEAST_LEVEL = 0.3, 1e-5
"""How far above the best bound the level starts, as a share of it, and below which share it starts anew, nearer."""

_PATIENCE = 3
"""Rounds that gain nothing after which the level comes closer."""

_PASSES = 2
"""Passes of messages a round, forward and back."""

_BUCKET_ENTRIES = 2_000
"""Entries of the largest table of mini-buckets."""

_REORDER_ROUNDS = 8
"""Rounds after which nodes are eliminated in another order."""

_SEARCH_SHARE = 0.8
"""Seconds of a local search, as a share of those of the round before it."""

_WORTH_A_PROCESS = 1_000
"""Nodes from which a second process searches near the best choice."""

_ROUNDING = 1e-9
"""The share that is taken off a bound, as its sums are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One strategy per node that fits, its cost, and a bound below which no fitting choice costs.

    `nodes_left` is how many nodes the reductions left, `rounds` how often prices were set.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    nodes_left: int
    rounds: int

    @property
    def gap(self) -> float:
        """The most that the cost may be above the optimum, as a share of it."""
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`seconds` of wall clock in all, less if a relative `gap` is reached; `seed` of what is random in the search.

    With two `workers`, a second process searches near the best choice.
    """

    seconds: float = 60.0
    gap: float = 1e-6
    seed: int = 0
    workers: int = 1


def solve(problem: GraphProblem, options: Options | None = None) -> Answer:
    """The best choice found in time. Raises PlanningError if none that fits was found."""
    options = options or Options()
    deadline = time.monotonic() + options.seconds
    reduction = reduce(problem)
    search = _Search(reduction.problem, options, deadline)
    if options.workers > 1 and len(reduction.problem.costs) >= _WORTH_A_PROCESS:
        with Companion(reduction.problem, options.seed + 1) as companion:
            search.run(companion)
    else:
        search.run(None)
    return _answer(problem, reduction, search)


def _answer(problem: GraphProblem, reduction: Reduction, search: _Search) -> Answer:
    choice = reduction.expand(search.near.best)
    cost = problem.cost(choice)
    if not np.isfinite(cost):
        raise PlanningError("no combination of strategies without a forbidden one was found; give more seconds")
    if not problem.fits(choice):
        raise PlanningError(
            f"no choice of strategies that fits was found: the best exceeds the limit by "
            f"{(problem.profile(choice) - problem.limits).max():.0f} bytes; give more memory or more seconds"
        )
    bound = search.bound + reduction.constant
    bound = min(bound - _ROUNDING * abs(bound), cost) if np.isfinite(bound) else -np.inf
    return Answer(choice=choice, cost=cost, bound=bound, nodes_left=len(search.near.best), rounds=search.rounds)


class _Search:
    """The best choice, the best bound, and the prices and messages so far."""

    def __init__(self, problem: GraphProblem, options: Options, deadline: float) -> None:
        self.problem, self.options, self.deadline = problem, options, deadline
        self.near = LocalSearch(problem, options.seed)
        self.land = self.near.land
        self.messages = Messages(problem)
        self.buckets: MiniBuckets | None = None
        self.bound = -np.inf
        self.rounds = self.improved = 0
        self.longest = 0.0
        self.prices: Floats = np.zeros(problem.limits.size)
        self.level, self.height, self.tries = -np.inf, 0.0, 0
        self.kept = self.prices, list(self.messages.sent)
        self.program = exact.size(problem)

    def run(self, companion: Companion | None) -> None:
        """Rounds until time is up or the gap is closed."""
        if not self.problem.costs:
            self.bound = 0.0
            return
        if self.program <= _TINY_PROGRAM:
            self._finish(self._left())
        while self._left() > self.longest and not self._closed():
            began = time.monotonic()
            self._round()
            spent = time.monotonic() - began
            if companion is not None:
                self._exchange(companion, 0.0)
            elif self.near.fits() and self.near.search(self.prices, began + spent * (1 + _SEARCH_SHARE)):
                self.improved = self.rounds
            self.longest = max(self.longest, time.monotonic() - began)
            if self.rounds - self.improved > _STALE_ROUNDS and _TINY_PROGRAM < self.program <= _SMALL_PROGRAM:
                self._finish(self._left() / 2)
                self.program = _SMALL_PROGRAM + 1
        if not self._closed():
            if self.near.fits():
                self.near.search(self.prices, self.deadline - self.longest / 2)
            if companion is not None:  # The answer that is on its way is old: ask once more.
                self._exchange(companion, max(0.0, self._left() / 2))
                self._exchange(companion, max(0.0, self._left() - self.longest / 4))

    def _exchange(self, companion: Companion, patience: float) -> None:
        received = companion.exchange(self.near.best, self.prices, patience)
        if received is not None:
            self._offer(received)

    def _round(self) -> None:
        """Bounds at the prices, the choices they lead to, and new prices."""
        self.rounds += 1
        priced, paid = self.land.priced(self.prices), float((self.prices * self.land.limits).sum())
        value = -np.inf
        for backward in (False, True) * _PASSES:
            value = self.messages.run(priced, backward=backward)
        nodes, edges = self.messages.shifted(priced)
        if self.buckets is None or self.rounds % _REORDER_ROUNDS == 0:
            self.buckets = MiniBuckets(self.problem, entries=_BUCKET_ENTRIES, rng=self.near.rng)
        tight, fine = self.buckets.run(nodes, edges)
        better = self.near.optimum(priced, fine)
        self.bound = max(self.bound, value - paid, tight - paid)
        for proposal in (fine, better):
            self._offer(proposal)
        self._reprice(better, max(value, tight) - paid)

    def _finish(self, seconds: float) -> None:
        """The integer program of the whole. Raises NoLegalPlanError if it has no answer."""
        choice, bound = exact.solve_exactly(self.problem, seconds)
        if bound == np.inf:
            raise NoLegalPlanError("no choice of strategies is legal and fits; give more memory")
        self.bound = max(self.bound, bound)
        if choice is not None:
            self._offer(choice)

    def _reprice(self, choice: Indices, value: float) -> None:
        rise = value - self.level
        self.tries += 1
        if rise > 0:
            self.kept = self.prices, list(self.messages.sent)
            if not np.isfinite(self.level):
                self.height = _FIRST_LEVEL * max(abs(value), 1.0)
            elif rise > 0.1 * self.height:
                self.tries = 0
                self.height *= 2.0 if rise > 0.5 * self.height else 1.0
            self.level = value
            if self.near.fits():
                self.height = min(self.height, self.land.cost(self.near.best) - value)
        elif self.tries > _PATIENCE:
            self._return()
            return
        slope = self.land.profile(choice) - self.land.limits
        slope = np.where((self.prices > 0) | (slope > 0), slope, 0.0)
        norm = float((slope * slope).sum())
        if norm > 0:
            step = (self.level + self.height - value) / norm
            self.prices = np.maximum(0.0, self.prices + step * slope)

    def _return(self) -> None:
        self.tries = 0
        self.height /= 2
        if self.height < _LEAST_LEVEL * abs(self.level):
            self.height = _FIRST_LEVEL * _FIRST_LEVEL * abs(self.level)
        self.prices, sent = self.kept
        self.messages.sent = list(sent)

    def _offer(self, choice: Indices) -> None:
        if self.near.offer(choice):
            self.improved = self.rounds

    def _closed(self) -> bool:
        cost = self.land.cost(self.near.best)
        return self.near.fits() and cost - self.bound <= self.options.gap * max(abs(cost), 1e-300)

    def _left(self) -> float:
        return self.deadline - time.monotonic()
