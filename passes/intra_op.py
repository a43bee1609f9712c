"""One strategy per node of a sharding problem, at the least total seconds.

The relaxation of the integer program (passes/strategy_program.py) is solved first, and at first with the mean of a
group's e in the place of w: the mean is below the maximum, so the bound is valid, and where readers agree it is exact.
Groups whose readers disagree get their w and the relaxation is solved again. Every relaxation is rounded and polished
to an answer; the search ends when answer and bound meet, branches if rows run out first, and always returns the best
answer with its bound.

Reference: design/intra_op.md 3.3-3.5.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from passes.errors import NoLegalPlanError, OverBudgetError, PlanningError
from passes.linear_program import ENOUGH, Solver
from passes.polish import polish
from passes.sharding_problem import ShardingProblem
from passes.strategy_program import StrategyProgram
from passes.tying import tie

_BRANCHING = 3.0
"""Times that the last relaxation took: less than that left is too late to branch."""

_PARTS = 4
"""Parts of equal nodes that budgets may treat differently."""

_GUESSED = 1e-2
"""From this gap on, what the prices of a program lead to may do."""

_LUMPY = 1e-3
_LEAN = 1e-2
"""Gaps at which a program with budgets, and one that seeks the least bytes, may end: they take long to close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One strategy per node; `objective` and `bound` in seconds; `branched` if the relaxation left a gap.

    `relaxations` counts the linear programs that were solved on the way.
    """

    choice: tuple[int, ...]
    objective: float
    bound: float
    status: Literal["optimal", "time limit"]
    branched: bool
    build_seconds: float
    solve_seconds: float
    variables: int
    rows: int
    relaxations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """`time_limit` in seconds of one solve, which ends early at a relative `gap` between answer and bound.

    `tie_radius` is the rounds of colour refinement that tie equal nodes; None solves every node apart.
    """

    solver: Solver = "highs"
    time_limit: float = 12.0
    gap: float = 1e-4
    tie_radius: int | None = 2


def solve(
    problem: ShardingProblem, options: SolverOptions | None = None, at_most: float = math.inf, *, branch: bool = True
) -> Answer:
    """The best strategy of every node, or any once it is clear that none takes less than `at_most` seconds.

    Without `branch` the relaxations alone are solved, and rounded. Raises PlanningError if no combination of strategies
    is legal.
    """
    options = options or SolverOptions()
    if problem.budgets:
        options = replace(options, gap=max(options.gap, _LUMPY))
    if options.tie_radius is None:
        return _solve(problem, options, at_most, branch)
    tied, classes = tie(problem, options.tie_radius, _PARTS if problem.budgets else 1)
    answer = _solve(tied, options, at_most, branch)
    choice = tuple(answer.choice[cls] for cls in classes)
    return replace(answer, choice=choice, objective=problem.evaluate(choice))


def leanest(problem: ShardingProblem, options: SolverOptions | None = None) -> tuple[int, ...]:
    """The strategies that come closest to the budgets, or stay furthest below them, whatever they cost.

    The relaxation is rounded and polished; where that leaves more than a percent, branching gets a few times as long.
    """
    options = options or SolverOptions()
    tied, classes = tie(problem, options.tie_radius or 2, _PARTS)
    start = time.perf_counter()
    program = StrategyProgram(tied, lean=True)
    program.run(options.solver, options.time_limit, options.gap)
    if not program.has_values():
        raise NoLegalPlanError(f"no legal plan was found within {options.time_limit:.0f} s; give the solver longer")
    strict = replace(tied, budgets=tuple(replace(b, limit=b.limit * program.objective) for b in tied.budgets))
    best = polish(strict, program.choice())
    if _excess(strict, best) > 1 + _LEAN:
        whole = StrategyProgram(tied, whole=True, lean=True)
        whole.run(options.solver, 1.0 + _BRANCHING * (time.perf_counter() - start), _LEAN)
        found = [best, whole.choice()] if whole.has_values() else [best]
        best = min(found, key=lambda choice: _excess(strict, choice))
    return tuple(best[cls] for cls in classes)


def _excess(problem: ShardingProblem, choice: Sequence[int]) -> float:
    """The most that an answer takes of any budget, as a share of it; infinite for an illegal answer."""
    if not np.isfinite(problem.evaluate(choice)):
        return float("inf")
    return max((problem.usage(budget, choice) / budget.limit for budget in problem.budgets), default=0.0)


def _impossible(problem: ShardingProblem) -> PlanningError:
    """The error of a problem without an answer."""
    if problem.budgets:
        return OverBudgetError("no combination of strategies keeps the memory limit")
    return NoLegalPlanError(
        "no combination of strategies is legal under this planner's restrictions; use planner=Auto(), or a mesh whose "
        "axes divide the arrays"
    )


def _solve(problem: ShardingProblem, options: SolverOptions, at_most: float, branch: bool) -> Answer:
    start = time.perf_counter()
    if any(not np.isfinite(own).any() for own in problem.seconds):
        node = next(n for n, own in enumerate(problem.seconds) if not np.isfinite(own).any())
        raise NoLegalPlanError(f"node {node} of the program has no legal strategy under this planner")
    program = StrategyProgram(problem, enough=at_most)
    built = time.perf_counter()
    best: tuple[int, ...] = ()
    objective, bound, branched, relaxed, relaxations = float("inf"), program.floor, False, 0.0, 0

    def closed() -> bool:
        return bool(np.isfinite(objective)) and objective - bound <= options.gap * objective

    def left() -> float:
        return options.time_limit - (time.perf_counter() - built)

    def wanted() -> bool:
        return bound < at_most or not np.isfinite(objective)

    def offer(choice: Sequence[int]) -> None:
        nonlocal best, objective
        found = polish(problem, choice)
        if problem.fits(found) and problem.evaluate(found) < objective:
            best, objective = found, problem.evaluate(found)

    if program.is_priced and (bound >= at_most or options.gap >= _GUESSED):
        offer(program.guess())
    while not closed() and left() > 0 and not branched and wanted():
        began, relaxations = time.perf_counter(), relaxations + 1
        status = program.run(options.solver, max(1.0, left()), options.gap)
        relaxed = time.perf_counter() - began
        if status == "infeasible":
            raise _impossible(problem)
        if status == ENOUGH:
            bound, program.enough = program.objective, np.inf
            offer(program.guess())
            continue
        if status != "optimal":
            break
        bound = max(bound, program.objective)
        offer(program.choice())
        if not closed() and not program.share_where_readers_disagree():
            branched = True
    # Branching puts all pairs back; a solver that gets it late overruns its limit by more than it could gain.
    if branched and branch and wanted() and left() > _BRANCHING * relaxed:
        program = StrategyProgram(problem, whole=True)
        ended = program.run(options.solver, left(), options.gap)
        if ended == "infeasible" and problem.budgets:
            raise _impossible(problem)
        if program.has_values():
            offer(program.choice())
        bound = objective if ended == "optimal" else bound
    if not best:
        offer([int(np.argmin(own)) for own in problem.seconds])
    if not np.isfinite(objective):
        raise PlanningError(
            f"no legal plan was found within {options.time_limit:.0f} s; give the solver a longer time_limit"
        )
    return Answer(
        choice=best,
        objective=objective,
        bound=min(bound, objective),
        status="optimal" if closed() else "time limit",
        branched=branched,
        build_seconds=built - start,
        solve_seconds=time.perf_counter() - built,
        variables=program.arrays.columns,
        rows=program.arrays.rows,
        relaxations=relaxations,
    )
