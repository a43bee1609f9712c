"""The search for one strategy per node of a sharding problem at the least total seconds, with a bound on that minimum.

    reduce     strategies that another replaces at no cost go                              (passes/solver/dominance.py)
    merge      equal nodes are made one: a smaller problem, whose answers are good ones     (passes/solver/symmetry.py)
    relax      the linear relaxation of the merged problem                               (passes/solver/formulation.py)
    round      its values are rounded, one node improved at a time                (passes/solver/coordinate_descent.py)
    bound      its prices bound the answers of the whole problem, merged or not          (passes/solver/lower_bound.py)
    fix        strategies that are in no better answer go
    eliminate  what is left is solved node by node, exactly where that is possible       (passes/solver/elimination.py)

Relaxations are tight for transformers, whose tables would be too large to eliminate; networks whose relaxation is
loose, square layers in a row among them, are thin enough to be eliminated. The relaxation is solved first with the mean
of a group's e in the place of w: the mean is below the maximum, so it is a relaxation still, and where readers agree it
is exact; groups whose readers disagree get their w and it is solved again.

With budgets, a merged program that is left with a gap is branched on in the place of elimination
(passes/solver/branching.py), and an answer need not be found where none takes less than what is known.

Limits are work: an answer does not depend on the machine's load unless `SolverOptions.time_limit` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from passes.errors import NoLegalPlanError, OverBudgetError, PlanningError
from passes.solver.branching import Branching
from passes.solver.clock import Clock
from passes.solver.coordinate_descent import coordinate_descent
from passes.solver.dominance import without_dominated
from passes.solver.elimination import EXACT_ENTRIES, Factors, eliminate, enclose
from passes.solver.formulation import StrategyProgram
from passes.solver.linear_program import CUTOFF
from passes.solver.lower_bound import Bound, lifted, loose, raised
from passes.solver.options import GAP, LUMPY, RADIUS, SolverOptions
from passes.solver.problem import ShardingProblem, meet
from passes.solver.pulp_solver import solver_named
from passes.solver.symmetry import MergedProblem, merge_equal_nodes

Status = Literal["optimal", "near optimal", "time limit"]

_PARTS = 4
"""Parts of equal nodes that budgets may treat differently. Without a budget, half and double find the same with the
same work (`python -m benchmarks.settings`)."""

_GUESSED = 1e-2
"""From this gap on, what the prices of a program lead to may do."""

_LEAST_MEMORY = 1e-2
"""The gap at which a program that seeks the least bytes may end: less takes long."""

_RELAXATIONS = 12
"""Relaxations of one program at most: each gives w to all groups whose readers disagree, and few rounds find them."""

_NEAR, _FAR = (2,), (4, 8)
"""Edges around the nodes at which a bound is loose, within which it is raised: at first, and where a gap is left."""

_PASSES = 8
"""Passes of messages that raise a bound: 4 leave twice the gap; more gain less than another look at what is loose."""

_RAISES = 3
"""The most times that a bound is raised within as many edges."""

_GAIN = 0.1
"""The share of the gap that raising a bound must close for more to be tried."""

_BETTER = 1e-2
"""The share by which an answer must be better for strategies to be fixed, and what is left eliminated, once more."""

_FEWER = 0.1
"""The share of entries to which that must lead: else it finds what was found before."""

_MOST_UNDECIDED = 400
"""Nodes with a choice left, beyond which a problem is not eliminated: its order alone takes seconds. It bounds time.
Half and double of it leave the steps of four small networks as they are (`python -m benchmarks.settings --only
solver.search`); `python -m benchmarks.solver` has large ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One strategy per node; `objective` and `bound` in seconds.

    `bound` holds for all answers of the problem that was asked, whatever was merged on the way. The status is `optimal`
    if they meet to the gap that was asked for, `time limit` if the user's limit ended the search, and else
    `near optimal`: `bound` says how near. `relaxations` counts the linear programs that were solved.
    """

    choice: tuple[int, ...]
    objective: float
    bound: float
    status: Status
    build_seconds: float
    solve_seconds: float
    relaxations: int = 0

    def is_within(self, gap: float) -> bool:
        """Whether the objective is at most this share of it above the bound."""
        return meet(self.objective, self.bound, gap)


def solve(
    problem: ShardingProblem,
    options: SolverOptions | None = None,
    cutoff: float = math.inf,
    *,
    close: bool = True,
    known: Sequence[Sequence[int]] = (),
) -> Answer:
    """The best strategy of every node, or any answer once it is clear that none takes less than `cutoff` seconds.

    Without `close`, the relaxation is solved, rounded and bounded, and a gap is left as it is. No answer is worse than
    those that are `known`. Raises PlanningError if no combination of strategies is legal; with budgets, NotCheaperError
    if none that is legal takes less than `cutoff` seconds and none was met.
    """
    search = Search(problem, options or SolverOptions())
    for choice in known:
        search.offer(choice)
    return search.run(cutoff, close=close)


class NotCheaperError(OverBudgetError):
    """The error where all answers that keep the budgets take as long as one that is known already, or longer."""


class Search:
    """The best answer to a problem so far and the best bound, in a state from which the search can continue."""

    def __init__(self, problem: ShardingProblem, options: SolverOptions) -> None:
        if not all(np.isfinite(node_seconds).any() for node_seconds in problem.seconds):
            raise _impossible(replace(problem, budgets=()))
        self.clock = Clock(options.time_limit)
        self.whole, self.cutoff = problem, math.inf
        self.options = replace(options, gap=options.gap_of(problem))
        self.problem = problem
        self.best: tuple[int, ...] | None = None
        self.objective, self.bound = math.inf, -math.inf
        self.lower: Bound | None = None
        self.relaxations = 0
        self.merged: MergedProblem | None = None
        self.program: StrategyProgram | None = None
        self.is_relaxed, self.closed_below = False, -math.inf

    def run(self, cutoff: float, *, close: bool) -> Answer:
        """The answer, as of `solve`, from where the search was left."""
        self.clock.go_on()
        self.cutoff = cutoff
        if self.options.solver is not None:
            self.solve_whole(self.options.solver)
        else:
            self.relax()
            if close and cutoff > self.closed_below:
                self.close()
                self.closed_below = cutoff
        return self.answer()

    def offer(self, choice: Sequence[int], *, improved: bool = False) -> None:
        """Keeps an answer of the whole problem if it is better."""
        candidate = tuple(choice) if improved else coordinate_descent(self.whole, choice)
        seconds = self.whole.evaluate(candidate)
        if seconds < self.objective and self.whole.fits(candidate):
            self.best, self.objective = candidate, seconds

    def is_closed(self) -> bool:
        """Whether answer and bound meet, or the answer need not be better."""
        if self.bound >= self.cutoff and (self.best is not None or self.problem.budgets):
            return True
        return meet(self.objective, self.bound, self.options.gap)

    def _is_near(self) -> bool:
        """Whether no more work is due: answer and bound meet, or nearly, where what is left takes long to close."""
        is_large = len(self.problem.edges) > self.options.untied
        return self.is_closed() or (is_large and meet(self.objective, self.bound, LUMPY))

    def relax(self) -> None:
        """The relaxation of the merged problem, with w where readers disagree; answers rounded from it, and a bound."""
        program = self.program or self._merged_program()
        program.cutoff = self.cutoff
        while not self.is_closed() and not self.clock.is_late and not self.is_relaxed:
            self.relaxations += 1
            status = program.run(gap=self.options.gap, seconds=self.clock.remaining)
            if status == "infeasible":
                raise _impossible(self.problem)
            if status not in ("optimal", CUTOFF):
                break
            self.is_relaxed = self.relaxations >= _RELAXATIONS
            if status == CUTOFF:
                self._take_bound(program)
                program.cutoff = np.inf
                self._offer_merged(program.guess())
                continue
            tight = self._offer_merged(program.choice()) <= (1 + self.options.gap) * program.objective
            self.is_relaxed |= tight or not program.share_where_readers_disagree()
            enough = min((1 - self.options.gap) * self.objective, self.cutoff)
            if self.is_relaxed or program.objective >= (1 - GAP) * enough:  # no prices prove more than its optimum
                self._take_bound(program)
        self._raise_bound(_NEAR)

    def _merged_program(self) -> StrategyProgram:
        """The program of the merged problem; if a rough answer will do, that of its first prices is taken."""
        self.problem = without_dominated(self.whole)
        radius, parts = self.options.radius(self.problem), _PARTS if self.problem.budgets else 1
        self.merged = merged = merge_equal_nodes(self.problem, radius, parts)
        self.program = program = StrategyProgram(merged.problem, cutoff=self.cutoff)
        self.clock.built()
        if program.is_priced and (program.start.least_seconds >= self.cutoff or self.options.gap >= _GUESSED):
            self._offer_merged(program.guess())
            self._take_bound(program)
        return program

    def _raise_bound(self, radii: Sequence[int]) -> None:
        """Raises the bound where it is loose, and ever further around while that gains."""
        for hops in radii:
            for _ in range(_RAISES):
                if self.lower is None or self.best is None or self._is_near() or self.clock.is_late:
                    return
                bound_before = self.bound
                self.lower = raised(self.problem, self.lower, loose(self.problem, self.lower, self.best, hops), _PASSES)
                self.bound = max(self.bound, self.lower.seconds)
                if self.bound - bound_before < _GAIN * (self.objective - bound_before):
                    break

    def _offer_merged(self, choice: Sequence[int]) -> float:
        """Takes an answer of the merged problem, improved by coordinate descent; its seconds, if it keeps the budgets.

        What the whole problem gains beyond that comes later.
        """
        assert self.merged is not None
        candidate = coordinate_descent(self.merged.problem, choice)
        self.offer([candidate[cls] for cls in self.merged.classes], improved=True)
        return self.merged.problem.evaluate(candidate) if self.merged.problem.fits(candidate) else math.inf

    def _take_bound(self, program: StrategyProgram) -> None:
        """Takes the bound at the prices of a program of the merged problem if it is better."""
        assert self.merged is not None
        candidate = lifted(self.problem, self.merged, program.edge_prices(), program.budget_prices())
        if self.lower is None or candidate.seconds > self.lower.seconds:
            self.lower, self.bound = candidate, max(self.bound, candidate.seconds)

    def close(self) -> None:
        """Reduces the gap between answer and bound, whichever of them causes it."""
        self._raise_bound(_FAR)
        if self.problem.budgets and not self._is_near():
            self.branch()
        if self.problem.budgets or self._is_near():
            return
        objective_before, entries = math.inf, math.inf
        while not self.is_closed() and self.objective < (1 - _BETTER) * objective_before:
            objective_before, entries = self.objective, self.eliminate(_FEWER * entries)

    def eliminate(self, most: float = math.inf) -> float:
        """Fixes what prices decide, and eliminates the rest node by node if that takes `most` entries; returns them."""
        if self.best is not None:
            self.offer(self.best)
        upper = math.inf if self.best is None else min(self.objective, self.cutoff)
        problem = self.problem if self.lower is None else self.lower.fix_strategies(self.problem, upper)
        if any(not np.isfinite(node_seconds).any() for node_seconds in problem.seconds):  # no answer is below `upper`
            self.bound = max(self.bound, upper)
            return 0.0
        if (
            sum(np.isfinite(node_seconds).sum() > 1 for node_seconds in problem.seconds) > _MOST_UNDECIDED
            or self.clock.is_late
        ):
            return math.inf
        factors = Factors(problem, self.lower)
        entries = factors.order.entries()
        if entries > most:
            return entries
        exact = entries <= EXACT_ENTRIES and factors.is_exact
        result = eliminate(factors, upper) if exact else enclose(factors, upper, self.options.gap)
        if result.choice is not None:
            self.offer(result.choice, improved=exact)
        self.bound = max(self.bound, min(result.bound, upper))
        return entries

    def branch(self) -> None:
        """Branches and bounds on the relaxation of merged nodes; where none is merged, that proves the whole."""
        if self.merged is None or self.program is None or self.clock.is_late:
            return
        branching = Branching(self.program, self._offer_merged, self.cutoff, self.options.gap)
        branching.run(self.objective, self.bound if self.merged.is_whole else 0.0, self.clock)
        if self.best is not None:
            self.offer(self.best)
        if not self.merged.is_whole:
            return
        if self.best is None and math.isinf(branching.bound):
            raise _impossible(self.problem)
        self.bound = max(self.bound, branching.bound)

    def solve_whole(self, solver: str) -> None:
        """Solves the whole integer program by a solver of PuLP."""
        self.problem = without_dominated(self.whole)
        program = StrategyProgram(self.problem, whole=True)
        self.clock.built()
        status = program.run_with(solver_named(solver, seconds=self.options.time_limit, gap=self.options.gap))
        if status == "infeasible":
            raise _impossible(self.problem)
        if program.has_values():
            self.offer(program.choice(), improved=True)
        if status == "optimal":
            self.bound = max(self.bound, min(self.objective, program.objective) * (1 - self.options.gap))

    def answer(self) -> Answer:
        """The best answer. Raises PlanningError if there is none."""
        if self.best is None:
            self.offer([int(np.argmin(node_seconds)) for node_seconds in self.whole.seconds])
        if self.best is None and not self.problem.budgets:
            self.eliminate()
        if self.best is None:
            time_limit = self.options.time_limit if self.clock.is_late else None
            raise _unfound(self.problem, time_limit, is_dearer=self.bound >= self.cutoff)
        self.clock.stop()
        bound = min(max(self.bound, 0.0), self.objective)
        is_within_gap = meet(self.objective, bound, self.options.gap)
        return Answer(
            choice=self.best,
            objective=self.objective,
            bound=bound,
            status="optimal" if is_within_gap else "time limit" if self.clock.is_late else "near optimal",
            build_seconds=self.clock.build_seconds,
            solve_seconds=self.clock.solve_seconds,
            relaxations=self.relaxations,
        )


def least_memory_choice(problem: ShardingProblem, options: SolverOptions | None = None) -> tuple[int, ...]:
    """The strategies that exceed the budgets least, or stay furthest below them, whatever they cost.

    The relaxation is rounded and improved by coordinate descent; where that leaves more than a percent, the program is
    branched on. Raises PlanningError where none is found, as in too little time.
    """
    options = options or SolverOptions()
    merged = merge_equal_nodes(problem, RADIUS if options.tie_radius is None else options.tie_radius, _PARTS)
    program = StrategyProgram(merged.problem, least_memory=True)
    program.run(gap=options.gap, seconds=options.time_limit)
    if not program.has_values():
        raise _unfound(replace(problem, budgets=()), options.time_limit, is_dearer=False)
    if program.objective <= 0:  # nothing is needed
        return tuple(program.choice()[cls] for cls in merged.classes)
    limits = (replace(b, limit=b.limit * program.objective) for b in merged.problem.budgets)
    strict = replace(merged.problem, budgets=tuple(limits))
    best = coordinate_descent(strict, program.choice())
    if _excess(strict, best) > 1 + _LEAST_MEMORY:
        least_program = StrategyProgram(merged.problem, whole=True, least_memory=True)
        least_program.run(gap=_LEAST_MEMORY, seconds=options.time_limit)
        choices = [best, least_program.choice()] if least_program.has_values() else [best]
        best = min(choices, key=lambda choice: _excess(strict, choice))
    return tuple(best[cls] for cls in merged.classes)


def _excess(problem: ShardingProblem, choice: Sequence[int]) -> float:
    """The most that an answer takes of any budget, as a share of it; infinite for an illegal answer."""
    if not np.isfinite(problem.evaluate(choice)):
        return float("inf")
    return max((problem.usage(budget, choice) / budget.limit for budget in problem.budgets), default=0.0)


def _unfound(problem: ShardingProblem, time_limit: float | None, *, is_dearer: bool) -> PlanningError:
    """The error of a problem to which no answer was found, within a time limit if there is one, or below a cutoff."""
    if is_dearer:
        return NotCheaperError("all combinations of strategies that keep the memory limit take too long")
    if time_limit is not None:
        return PlanningError(
            f"no legal plan was found within {time_limit:g} s; give SolverOptions a longer time_limit="
        )
    if problem.budgets:
        return OverBudgetError("no combination of strategies was found that keeps the memory limit")
    return _impossible(problem)


def _impossible(problem: ShardingProblem) -> PlanningError:
    """The error of a problem without an answer."""
    if problem.budgets:
        return OverBudgetError("no combination of strategies keeps the memory limit")
    return NoLegalPlanError(
        "no combination of strategies is legal under this planner's restrictions; use planner=Auto(), or a mesh whose "
        "axes divide the arrays"
    )
