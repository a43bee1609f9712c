"""The cheapest answer that fits in memory: solve, look where it does not fit, forbid that, solve again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from passes.budgets import budget
from passes.errors import NoLegalPlanError, OverBudgetError, PlanningError
from passes.intra_op import Answer, SolverOptions, leanest, solve
from passes.problem import Assembly

_ROUNDS = 8
_PROGRESS = 0.99
"""A peak this much below the lowest one so far is progress; two rounds without any are the last."""

_SECONDS = 4.0
"""Of one round: what is not found by then is found by another round or another form of the step."""

Peak = Callable[[Sequence[int]], "Point"]
"""Where an answer's memory is highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The node at which most is live, and the bytes."""

    node: int
    nbytes: float


def within(
    assembly: Assembly,
    first: Answer,
    limit: float,
    options: SolverOptions,
    peak: Peak,
    offloaded: Sequence[int] = (),
) -> Answer:
    """The cheapest answer whose peak is at most `limit`, starting from one without a limit.

    The inputs at `offloaded` are kept elsewhere.

    Raises OverBudgetError where the program proves that there is none, or comes no nearer.
    """
    start = time.perf_counter()
    options = replace(options, time_limit=min(options.time_limit, _SECONDS))
    problem, answer, lowest, stalled = assembly.problem, first, float("inf"), 0
    for _ in range(_ROUNDS):
        point = peak(answer.choice)
        if point.nbytes <= limit:
            return replace(answer, solve_seconds=time.perf_counter() - start)
        stalled = 0 if point.nbytes < _PROGRESS * lowest else stalled + 1
        lowest = min(lowest, point.nbytes)
        if stalled > 1:
            break
        row = budget(assembly, point.node, answer.choice, point.nbytes, limit, offloaded)
        problem = replace(problem, budgets=(*problem.budgets, row))
        try:
            answer = solve(problem, options)
        except (NoLegalPlanError, OverBudgetError):
            raise
        except PlanningError as error:
            raise OverBudgetError(str(error)) from error
    raise OverBudgetError("no plan below the memory limit was found")


def least(
    assembly: Assembly, first: Answer, options: SolverOptions, peak: Peak, offloaded: Sequence[int] = ()
) -> tuple[tuple[int, ...], Point]:
    """The answer that needs the least memory, and its peak: budgets at the busiest points met so far, minimised."""
    problem, choice = assembly.problem, first.choice
    best, point = choice, peak(choice)
    for _ in range(_ROUNDS // 3):
        there = peak(choice)
        if there.nbytes < point.nbytes:
            best, point = choice, there
        row = budget(assembly, there.node, choice, there.nbytes, there.nbytes / 2, offloaded)
        problem = replace(problem, budgets=(*problem.budgets, replace(row, limit=max(row.limit, 1.0))))
        choice = leanest(problem, options)
        if choice == best:
            break
    there = peak(choice)
    return (choice, there) if there.nbytes < point.nbytes else (best, point)
