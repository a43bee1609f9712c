"""Answers within a memory limit brought nearer to the optimum, and the proof, over all meshes, of how near they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.intra_op.memory_limit import LOOSE, Fitted, filled, seconds_within, tightened
from passes.intra_op.mesh_memory import MeshMemory
from passes.intra_op.mesh_problems import MeshProblems, Solved
from passes.solver import Answer, Search, SolverOptions

_FAR = 0.1
"""The gap of a plan within a limit from which branching for its bound on other meshes is left: it takes as long as the
search itself, and leaves most of such a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The bytes of a limit, those that what is known without a search may need instead, and two numbers of seconds: no
    answer that takes `cutoff` or more is looked for, and where it is proven that all take `enough`, no more is.
    """

    limit: float
    allowed: float
    cutoff: float
    enough: float


def run(problems: MeshProblems, solved: Solved, options: SolverOptions, cutoff: float, *, close: bool) -> Answer:
    """The answer to a mesh's problem, its search gone on with; one of `cutoff` or more need not be the best."""
    search = solved.search or Search(solved.assembly.problem, options)
    before = search.clock.build_seconds, search.clock.solve_seconds
    answer = search.run(cutoff, close=close)
    problems.count_solve(answer.build_seconds - before[0], answer.solve_seconds - before[1])
    return answer


def better(answer: Answer, known: Answer) -> Answer:
    """The cheaper of two answers to one problem, with the better bound."""
    best = min(answer, known, key=lambda candidate: candidate.objective)
    return replace(best, bound=min(max(answer.bound, known.bound), best.objective))


def proven(
    problems: MeshProblems,
    meshes: Sequence[Solved],
    best: tuple[Solved, Fitted],
    goal: Goal,
    options: SolverOptions,
) -> tuple[Solved, Answer, float]:
    """The best answer that fits, brought nearer to the optimum, and what plans of other problems take at least.

    Those are on another mesh, or fetch weights otherwise on the same one. No more than the bound of the best need be
    proven of them, nor than is enough, and where that is far from it, no more than a relaxation says.
    """
    (chosen, fitted), cutoff, enough = best, goal.cutoff, goal.enough
    limit = goal.limit if problems.peak(chosen, fitted.answer.choice).nbytes <= goal.limit else goal.allowed
    if not fitted.problem.budgets and problems.peak(chosen, chosen.answer.choice).nbytes <= limit:
        chosen, fitted = _unlimited(problems, chosen, fitted, limit, options)
    memory, least = MeshMemory(problems=problems, solved=chosen, limit=limit), enough
    fitted = filled(fitted, memory, replace(options, gap=max(options.gap, LOOSE)), cutoff)
    answer = tightened(fitted, memory, options, cutoff, enough)
    for solved in meshes:
        most = min(answer.bound, enough)
        forms = problems.forms(solved) if solved.answer.bound < most else []
        if forms is None:
            least = min(least, solved.answer.bound)
        for form in (form for form in forms or () if form.assembly is not chosen.assembly):
            resident, is_near = problems.resident(form), answer.is_within(_FAR)
            kept = seconds_within(form.assembly.problem, resident, limit, options, most, close=is_near)
            least = min(least, max(solved.answer.bound, kept))
    return chosen, answer, least


def _unlimited(
    problems: MeshProblems, solved: Solved, fitted: Fitted, limit: float, options: SolverOptions
) -> tuple[Solved, Fitted]:
    """A mesh whose cheapest answer, whatever it needs, keeps the limit: solved to the end, where that keeps it, too.

    Without budgets, strategies that others replace at no cost are left out: DPO of three blocks has a third as many.
    """
    answer = run(problems, replace(solved, search=None), options, fitted.answer.objective, close=True)
    solved = replace(solved, answer=better(answer, solved.answer))
    nbytes = problems.peak(solved, solved.answer.choice).nbytes
    if nbytes > limit or solved.answer.objective >= fitted.answer.objective:
        return solved, fitted
    return solved, replace(fitted, answer=solved.answer, nbytes=nbytes)
