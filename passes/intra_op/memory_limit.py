"""The cheapest answer within a memory limit, by cutting planes: solve, add a row where memory is exceeded,
solve again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.errors import NoLegalPlanError, OverBudgetError, PlanningError
from passes.intra_op.memory_budgets import budget
from passes.intra_op.mesh_memory import MeshMemory
from passes.intra_op.mesh_problems import Solved
from passes.solver import (
    Answer,
    Budget,
    NotCheaperError,
    Search,
    ShardingProblem,
    SolverOptions,
    least_memory_choice,
    solve,
)

_ROUNDS = 8
"""The number of cutting planes tried, each with a solve of its own; `python -m benchmarks.memory_limit` shows what
fits.
"""

_LEAST_ROUNDS, _AIM = 2, 0.5
"""Rounds of looking for the least memory, and the share of a peak that each aims at: too little for any answer, so that
all of the rows are pushed down. What is found is a lower limit to try and part of a message, and no plan."""

_PROGRESS = 0.99
"""A peak this much below the lowest one so far is progress; two rounds without any are the last."""

LOOSE = 2e-2
"""The relative gap at which the solve of a round may end: most answers are forbidden by the next round."""

_WIDE = 0.5
"""The relative gap from which the answer of a relaxation is improved by branching: rounded under budgets, that of six
shared layers took three times its bound, and was then taken for one that is slower than another plan.
"""

_FILLINGS, _FULL = 4, 0.95
"""Solves that give what is left of a limit to the rows, and the share of the limit from which nothing is. Rows count
values that compilers make anew where they are read, 93 kB of a GPT of one layer of which 52 are there: within .9 of the
free plan's peak its plan needed .42, and took 1.06 times what one of .65 does."""


class InfeasibleRowError(OverBudgetError):
    """The error where the smallest strategies of all nodes together exceed a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """An answer on a mesh, which was `solved` without a limit, that fits: the `stated` problem with the budgets that
    led to it, and the bytes of its peak.
    """

    solved: Solved
    stated: ShardingProblem
    answer: Answer
    nbytes: float


def fit(memory: MeshMemory, options: SolverOptions, cutoff: float = math.inf) -> Fitted:
    """A cheap answer that keeps the limit, starting from the one without a limit; `tightened` brings it nearer to the
    optimum.

    Budgets at the peak nodes of other meshes are stated from the start, raised by as much as rows there overestimate;
    those of peaks met here are added. If the first answer keeps the limit with state offloaded, only cheaper ones are
    looked for.

    Raises OverBudgetError where no answer is found or none exists; InfeasibleRowError where the least strategies of all
    nodes exceed a budget; NotCheaperError where no answer takes less than `cutoff` seconds.
    """
    options = replace(options, gap=max(options.gap, LOOSE))
    known = memory.settled(memory.solved.answer)
    if known.objective >= cutoff or memory.peak(known.choice).nbytes > memory.limit:
        return _by_rows(memory, options, cutoff)
    try:
        fitted = _by_rows(memory, options, known.objective)
        if fitted.answer.objective < known.objective:
            return fitted
    except OverBudgetError:  # nothing cheaper was found that keeps the limit, and this does
        pass
    problem = replace(memory.program, budgets=tuple(memory.budgets().values()))
    return Fitted(solved=memory.solved, stated=problem, answer=known, nbytes=memory.peak(known.choice).nbytes)


def is_out_of_reach(memory: MeshMemory) -> bool:
    """Whether it is seen without a solver that no answer keeps the limit, not even the known one with all idle state
    offloaded.
    """
    if not is_infeasible(replace(memory.program, budgets=tuple(memory.budgets().values()))):
        return False
    first, settled = memory.solved.answer, memory.settled(memory.solved.answer)
    return settled is first or memory.peak(settled.choice).nbytes > memory.limit


def _by_rows(memory: MeshMemory, options: SolverOptions, cutoff: float) -> Fitted:
    """A cheap answer that keeps the limit, by a budget at each peak that does not."""
    program, limit = memory.program, memory.limit
    stated = answer = memory.solved.answer
    lowest, stalled = float("inf"), 0
    rows = memory.budgets()
    problem = replace(program, budgets=tuple(rows.values()))
    if is_infeasible(problem):
        raise InfeasibleRowError("no combination of strategies keeps the memory limit")
    for _ in range(_ROUNDS):
        point = memory.peak(answer.choice)
        if point.nbytes <= limit:
            nbytes = memory.peak(stated.choice).nbytes
            fitted = Fitted(solved=memory.solved, stated=problem, answer=answer, nbytes=nbytes)
            return filled(fitted, memory, options, cutoff, close=False)
        if answer.objective >= cutoff:  # further rows make it dearer
            raise NotCheaperError("what fits takes more time than another plan")
        stalled = 0 if point.nbytes < _PROGRESS * lowest else stalled + 1
        lowest = min(lowest, point.nbytes)
        if stalled > 1:
            break
        new = budget(program, memory.row(point.at), answer.choice, point.nbytes, memory.room(answer.choice))
        rows[point.at] = min(new, rows.get(point.at, new), key=lambda row: row.limit)
        memory.problems.note_peak(memory.solved, answer.choice, point)
        problem = replace(problem, budgets=tuple(rows.values()))
        if is_infeasible(problem):  # a solver would take long to see it
            raise OverBudgetError("no combination of strategies keeps the memory limit at its busiest node")
        try:
            stated = _roughly(problem, options, cutoff)
        except (NoLegalPlanError, OverBudgetError):
            raise
        except PlanningError as error:
            raise OverBudgetError(str(error)) from error
        answer = memory.settled(stated)
        if answer.bound >= cutoff:
            raise NotCheaperError("what fits takes more time than another plan")
    raise OverBudgetError("no plan below the memory limit was found")


def _roughly(problem: ShardingProblem, options: SolverOptions, cutoff: float) -> Answer:
    """An answer from the relaxation; from branch and bound where that finds none, or one far above its bound."""
    search = Search(problem, options)
    try:
        answer = search.run(cutoff, close=False)
    except NotCheaperError:
        raise
    except OverBudgetError:
        return search.run(cutoff, close=True)
    return answer if answer.is_within(_WIDE) else search.run(cutoff, close=True)


def filled(
    fitted: Fitted, memory: MeshMemory, options: SolverOptions, cutoff: float = math.inf, *, close: bool = True
) -> Fitted:
    """The answer that fits, or a better one where the rows that led to it leave a part of the limit unused.

    Answers of `cutoff` seconds or more are not looked for. Rows are raised by the unused part, and by half of it where
    that is too much. Without `close`, only relaxations are solved.
    """
    program, raised, most, limit = fitted.stated, 1.0, math.inf, memory.limit
    least = memory.solved.answer.bound
    for _ in range(_FILLINGS if program.budgets else 0):
        if fitted.nbytes > _FULL * limit or fitted.answer.objective <= (1 + LOOSE) * least:
            break
        factor = min(raised * limit / fitted.nbytes, math.sqrt(raised * most))
        problem = _scaled(program, factor)
        best = fitted.answer
        try:
            stated = solve(problem, options, min(best.objective, cutoff), close=close, known=[best.choice])
        except PlanningError:  # nothing is better, as far as was looked
            break
        answer = memory.settled(stated)
        if answer.objective >= best.objective:
            break
        if memory.peak(answer.choice).nbytes <= limit:
            nbytes, raised = memory.peak(stated.choice).nbytes, factor
            fitted = replace(fitted, stated=problem, answer=answer, nbytes=nbytes)
        else:
            most = factor
    return fitted


def _scaled(problem: ShardingProblem, factor: float) -> ShardingProblem:
    """The problem with the limit of each budget multiplied by a factor."""
    return replace(problem, budgets=tuple(replace(row, limit=factor * row.limit) for row in problem.budgets))


def ruled_out(problem: ShardingProblem, choice: Sequence[int], share: float) -> ShardingProblem:
    """The problem with budgets that rule a choice out: the one that it fills most has this share of what it uses."""
    fill = max(problem.usage(row, choice) / row.limit for row in problem.budgets)
    return _scaled(problem, min(fill, 1.0) * share)


def seconds_within(
    program: ShardingProblem, resident: Budget, limit: float, options: SolverOptions, cutoff: float, *, close: bool
) -> float:
    """A lower bound in seconds on answers whose `resident` bytes keep `limit`; `cutoff` or more once that is seen."""
    problem = replace(program, budgets=(replace(resident, limit=limit),))
    if is_infeasible(problem):
        return math.inf
    try:
        return solve(problem, replace(options, gap=max(options.gap, LOOSE)), cutoff, close=close).bound
    except NotCheaperError:
        return cutoff
    except PlanningError:  # none was found, which need not be a proof that there is none
        return 0.0


def is_infeasible(problem: ShardingProblem) -> bool:
    """Whether the least strategies of all nodes exceed a budget."""
    return any(problem.least(row) > row.limit for row in problem.budgets)


def tightened(
    fitted: Fitted, memory: MeshMemory, options: SolverOptions, cutoff: float = math.inf, enough: float = math.inf
) -> Answer:
    """An answer that fits, brought nearer to the optimum, with the time that it took.

    The budgets that led to it are estimates and prove nothing. Its lower bound is that of the problem in which no more
    than the limit is resident for the whole step, as in every answer that fits; that is solved while the known bound is
    below `enough` seconds. Answers of `cutoff` seconds or more are not looked for.
    """
    start, limit = time.perf_counter(), memory.limit
    answer = replace(fitted.answer, bound=min(memory.solved.answer.bound, fitted.answer.objective))
    whole = replace(fitted.stated, budgets=(replace(memory.problems.resident(memory.solved), limit=limit),))
    bound, stated = answer.bound, fitted.stated
    is_open = bound < enough or not stated.budgets
    if proof := _nearer(whole, answer, options, cutoff) if is_open else None:
        bound, proof = max(bound, proof.bound), memory.settled(proof)
        if (nbytes := memory.peak(proof.choice).nbytes) <= limit:
            answer = min(proof, answer, key=lambda known: known.objective)
        elif not stated.budgets:  # a hand-made plan has none
            stated = ruled_out(whole, proof.choice, limit / nbytes)
        answer = replace(answer, bound=min(bound, answer.objective))
    for _ in range(_FILLINGS if stated.budgets else 0):
        closer = _nearer(stated, answer, options, min(answer.objective, cutoff))
        if closer is None or (closer := memory.settled(closer)).objective >= answer.objective:
            break
        if (nbytes := memory.peak(closer.choice).nbytes) <= limit:
            answer = replace(closer, bound=min(bound, closer.objective))
            break
        stated = ruled_out(stated, closer.choice, limit / nbytes)  # rows are estimates, and let too much through
    is_closed = answer.is_within(options.gap)
    status = answer.status if answer.status == "time limit" else "optimal" if is_closed else "near optimal"
    return replace(answer, status=status, solve_seconds=answer.solve_seconds + time.perf_counter() - start)


def _nearer(problem: ShardingProblem, answer: Answer, options: SolverOptions, cutoff: float) -> Answer | None:
    """The best answer to a problem; None where there is none, what is known is near enough, or time is over."""
    if answer.is_within(options.gap_of(problem)):
        return None
    try:
        return solve(problem, options, cutoff, known=[answer.choice])
    except PlanningError:  # out of time, or nothing is better
        return None


def look_for_least(memory: MeshMemory, options: SolverOptions) -> None:
    """Looks for answers that need less and less memory; `memory.problems` keeps the one of least bytes.

    The budgets at the peak nodes met so far are minimised.
    """
    problem, choice = memory.program, memory.settled(memory.solved.answer).choice
    best, least_nbytes = choice, math.inf
    for _ in range(_LEAST_ROUNDS):
        point = memory.peak(choice)
        if point.nbytes < least_nbytes:
            best, least_nbytes = choice, point.nbytes
        new = budget(memory.program, memory.row(point.at), choice, point.nbytes, _AIM * point.nbytes)
        problem = replace(problem, budgets=(*problem.budgets, replace(new, limit=max(new.limit, 1.0))))
        try:
            choice = least_memory_choice(problem, options)
        except PlanningError:  # out of time: the lowest one so far it is
            break
        if choice == best:
            break
    memory.peak(choice)  # which is noted with that
