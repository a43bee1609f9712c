r"""Branch and bound over the answers of a problem with budgets, on its relaxation, which is thin and already solved.

A part of the answers is what the strategies that are left allow. It is relaxed with the columns of others at 0, from
the basis at which the part that it was cut from ended: a few hundred simplex steps where a solver of integer programs
takes minutes for presolve, cuts and heuristics on the program of whole strategies, which is three to six times larger.

    bound     the relaxation's prices bound the part, whatever relaxation that is         (passes/solver/lower_bound.py)
    fix       strategies that are in no better answer go
    round     to the largest values, and to the fewest bytes among what has a value: budgets leave nodes undecided
    divide    at the node whose undecided strategies differ most in what they take of the budgets, by the placements of
              what it makes; in the place of single strategies, of which several make the same

The part with the lowest bound is the next, but for what was just cut off while that is not much worse: answers are
found by going down. What a part is worth when all nodes are decided is known exactly: given the work, this ends.

Reference: Land and Doig, An automatic method of solving discrete programming problems (Econometrica 28, 1960).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from passes.solver.clock import Clock
from passes.solver.formulation import StrategyProgram
from passes.solver.linear_program import Basis
from passes.solver.lower_bound import loose, priced
from passes.solver.problem import Floats, meet

_PARTS = 200
_STEPS = 50_000
"""Parts that are looked at, and simplex steps that all their relaxations take, at most: work, so that an answer does
not depend on the machine's load. A part of 400 edges takes half a second, a third of it steps."""

_ROUND, _GAIN = 8, 0.1
"""The parts in which the gap must close by this share, once there is an answer: else the rest would take too many."""

_DOWN = 0.3
"""The share of the gap by which a part's bound may be above the lowest for it to be the next, from the basis at hand:
as SCIP's `maxplungequot`, which is 0.25. It hardly matters: 60 random problems of 14 nodes within a budget took 3,134
parts with 0.25 and with 0.3, 3,143 with 0, 3,152 with 0.6 and 3,186 with 1, to the same answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Answers with strategies of finite `seconds` alone, none below `bound`, and the basis to start from, if known."""

    bound: float
    seconds: tuple[Floats, ...]
    basis: Basis | None = None


class Branching:
    """The open parts of a relaxed `program`'s answers, and the bound of those that cannot be divided.

    `offer` takes an answer and returns its seconds, infinite if it exceeds a budget. Answers of `cutoff` seconds or
    more are not looked for, nor any once the best is within `gap` of the `bound`.
    """

    def __init__(
        self, program: StrategyProgram, offer: Callable[[Sequence[int]], float], cutoff: float, gap: float
    ) -> None:
        self.program, self.problem = program, program.problem
        self.offer, self.cutoff, self.gap = offer, cutoff, gap
        self.objective = math.inf
        self.heap: list[tuple[float, int, _Part]] = []
        self.next: _Part | None = None
        self.indivisible = math.inf
        self.offered: set[tuple[int, ...]] = set()
        self.made = {edge.source: edge.before for edge in reversed(self.problem.edges)}
        self.count = self.pushed = 0

    def run(self, objective: float, bound: float, clock: Clock) -> None:
        """Divides parts, starting with all answers, of which the best known takes `objective` and none less than
        `bound`.
        """
        self.objective, steps, self.program.cutoff = objective, self.program.iterations, math.inf
        self.next = _Part(bound=bound, seconds=self.problem.seconds)
        gap_before, after = math.inf, 0
        while not self.is_closed() and self.count < _PARTS and self.program.iterations - steps < _STEPS:
            if clock.is_late:
                break
            if self.count >= after:
                gap_now, after = self.upper - self.bound, self.count + _ROUND
                if math.isfinite(self.objective) and gap_now > (1 - _GAIN) * gap_before:
                    break
                gap_before = gap_now
            part, self.next = self.next or heapq.heappop(self.heap)[-1], None
            if part.bound < self.upper:
                self.count += 1
                self._look(part, clock)
        self.program.allow(self.problem.seconds)

    @property
    def upper(self) -> float:
        """The seconds from which answers are of no use."""
        return min(self.objective, self.cutoff)

    @property
    def bound(self) -> float:
        """A lower bound in seconds on all answers of use; infinite where there is none."""
        lowest = self.heap[0][0] if self.heap else math.inf
        return min(lowest, self.indivisible, self.upper, self.next.bound if self.next else math.inf)

    def is_closed(self) -> bool:
        """Whether nothing is open, or no better answer is asked for."""
        if self.next is None and not self.heap:
            return True
        return self.bound >= self.cutoff or meet(self.objective, self.bound, self.gap)

    def _look(self, part: _Part, clock: Clock) -> None:
        """Bounds a part, offers answers of it, and divides it if there may be better ones."""
        program = self.program
        program.allow(part.seconds, part.basis)
        status = program.run(gap=self.gap, seconds=clock.remaining)
        if status == "infeasible":
            return
        if status != "optimal":
            self.indivisible = min(self.indivisible, part.bound)
            return
        prices = {id(e): p for e, p in zip(self.problem.edges, program.edge_prices(), strict=True)}
        problem = replace(self.problem, seconds=part.seconds)
        lower = priced(problem, prices, program.budget_prices())
        undecided, choice = program.open_nodes(), program.choice()
        for candidate in dict.fromkeys((choice, self._leanest(choice, undecided))):
            if candidate not in self.offered:
                self.offered.add(candidate)
                self.objective = min(self.objective, self.offer(candidate))
        part = replace(part, bound=max(part.bound, lower.seconds))
        if part.bound >= self.upper:
            return
        if not undecided and program.share_where_readers_disagree():
            self.next = replace(part, basis=None)
            return
        if math.isfinite(self.upper):
            problem = lower.fix_strategies(problem, self.upper)
        part = replace(part, seconds=problem.seconds, basis=program.arrays.basis)
        if undecided:
            node = max(undecided, key=lambda node: self._spread(node, undecided[node]))
            self._divide(part, node, self._side(node, undecided[node], choice[node]))
        elif several := [node for node, seconds in enumerate(part.seconds) if np.isfinite(seconds).sum() > 1]:
            missing = loose(self.problem, lower, choice, 0)
            node = next((node for node in several if node in missing), several[0])
            self._divide(part, node, self._only(node, choice[node]))
        elif self.problem.fits(choice):  # it is the one answer that is left, and was offered
            self.indivisible = min(self.indivisible, max(part.bound, self.problem.evaluate(choice)))

    def _leanest(self, choice: Sequence[int], undecided: dict[int, Floats]) -> tuple[int, ...]:
        """The answer with the fewest bytes at undecided nodes, as shares of all budgets, where these differ."""
        lean = list(choice)
        for node, values in undecided.items():
            taken = np.where(values > 0, self._taken(node).sum(axis=0), np.inf)
            if taken.min() < taken[choice[node]]:
                lean[node] = int(np.argmin(taken))
        return tuple(lean)

    def _taken(self, node: int) -> Floats:
        """The share of each budget that a node's strategies take, [budgets, strategies]."""
        none = np.zeros(self.problem.seconds[node].size)
        return np.array([budget.nbytes.get(node, none) / budget.limit for budget in self.problem.budgets])

    def _spread(self, node: int, values: Floats) -> tuple[float, float]:
        """The difference of a node's undecided strategies in what they take of the budgets, and how undecided it is."""
        taken = self._taken(node)
        mean = (taken * values).sum(axis=1, keepdims=True)
        return float((values * np.abs(taken - mean)).sum()), 1.0 - float(values.max())

    def _side(self, node: int, values: Floats, chosen: int) -> NDArray[np.bool_]:
        """The strategies that make what most values are for, or the one chosen where all make the same."""
        made = self.made.get(node)
        if made is not None:
            side = made == np.argmax(np.bincount(made, weights=values))
            if values[~side].any():
                return side
        return self._only(node, chosen)

    def _only(self, node: int, chosen: int) -> NDArray[np.bool_]:
        return np.arange(self.problem.seconds[node].size) == chosen

    def _divide(self, part: _Part, node: int, side: NDArray[np.bool_]) -> None:
        """Cuts a part in two by the strategies of a node, and goes on with those on the `side` or leaves both."""
        lowest = min(self.bound, part.bound)
        goes_down = part.bound <= lowest + _DOWN * (self.upper - lowest)
        for inside in (False, True):
            seconds = list(part.seconds)
            seconds[node] = np.where(side == inside, seconds[node], np.inf)
            if not np.isfinite(seconds[node]).any():
                continue
            piece = replace(part, seconds=tuple(seconds))
            if inside and goes_down:
                self.next = replace(piece, basis=None)  # it starts where the relaxation is
            else:
                self.pushed += 1
                heapq.heappush(self.heap, (part.bound, -self.pushed, piece))
