"""Answers within a memory limit brought nearer to the optimum, with a bound that holds over all meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.intra_op.memory_limit import LOOSE, Fitted, filled, seconds_within, tightened
from passes.intra_op.mesh_memory import MeshMemory
from passes.intra_op.mesh_problems import MeshProblems, Solved
from passes.limits import Limits
from passes.plan import LATE
from passes.solver import Answer, Search, SolverOptions

_FAR = 0.1
"""The gap of a plan within a limit from which bounds on other meshes are not improved by branching: it takes as long as
the search itself, and leaves most of such a gap.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The memory limits, and when to stop: no answer of `cutoff` seconds or more is looked for; once all are proven to
    take at least `enough` seconds, no more is proven.
    """

    limits: Limits
    cutoff: float
    enough: float


def run(problems: MeshProblems, solved: Solved, options: SolverOptions, cutoff: float, *, close: bool) -> Answer:
    """The answer to a mesh's problem, by continuing its search; an answer of `cutoff` seconds or more need not be the
    best.
    """
    search = solved.search or Search(solved.assembly.problem, options)
    before = search.clock.build_seconds, search.clock.solve_seconds
    answer = search.run(cutoff, close=close)
    problems.count_solve(answer.build_seconds - before[0], answer.solve_seconds - before[1])
    return answer


def better(answer: Answer, known: Answer) -> Answer:
    """The cheaper of two answers to one problem, with the better bound; a time limit that ended either search stays
    known.
    """
    best = min(answer, known, key=lambda candidate: candidate.objective)
    is_late = best.status != "optimal" and LATE in (answer.status, known.status)
    bound = min(max(answer.bound, known.bound), best.objective)
    return replace(best, bound=bound, status=LATE if is_late else best.status)


def proven(
    problems: MeshProblems,
    meshes: Sequence[Solved],
    fitted: Fitted,
    goal: Goal,
    options: SolverOptions,
) -> tuple[Solved, Answer, float]:
    """(problem, answer, least seconds of other problems): the best answer that fits, brought nearer to the optimum.

    The other problems are those of other meshes, and the twin of the same one. Their bounds need not exceed the bound
    of the best or `enough`; where the best is far from its bound, only their relaxations are solved.
    """
    chosen, limits, cutoff, enough = fitted.solved, goal.limits, goal.cutoff, goal.enough
    keeps_limit = problems.peak(chosen, fitted.answer.choice).nbytes <= limits.searched
    limit = limits.searched if keeps_limit else limits.hand_made
    if not fitted.stated.budgets and problems.peak(chosen, chosen.answer.choice).nbytes <= limit:
        fitted = _unlimited(problems, fitted, limit, options)
        chosen = fitted.solved
    memory, least = MeshMemory(problems=problems, solved=chosen, limit=limit), enough
    fitted = filled(fitted, memory, replace(options, gap=max(options.gap, LOOSE)), cutoff)
    answer = tightened(fitted, memory, options, cutoff, enough)
    for solved in meshes if answer.objective < cutoff else ():  # else it is of no use, and so are bounds beside it
        most = min(answer.bound, enough)
        both = problems.with_twin(solved) if solved.answer.bound < most else []
        if both is None:
            least = min(least, solved.answer.bound)
        for other in (other for other in both or () if other.assembly is not chosen.assembly):
            resident, is_near = problems.resident(other), answer.is_within(_FAR)
            kept = seconds_within(other.assembly.problem, resident, limit, options, most, close=is_near)
            least = min(least, max(solved.answer.bound, kept))
    return chosen, answer, least


def _unlimited(problems: MeshProblems, fitted: Fitted, limit: float, options: SolverOptions) -> Fitted:
    """The answer on a mesh whose cheapest of all keeps the limit: solved without budgets to the gap of the options.

    Without budgets, strategies that others replace at no cost are left out: DPO of three blocks has a third as many.
    """
    answer = run(problems, replace(fitted.solved, search=None), options, fitted.answer.objective, close=True)
    solved = replace(fitted.solved, answer=better(answer, fitted.solved.answer))
    nbytes = problems.peak(solved, solved.answer.choice).nbytes
    if nbytes > limit or solved.answer.objective >= fitted.answer.objective:
        return replace(fitted, solved=solved)
    return replace(fitted, solved=solved, answer=solved.answer, nbytes=nbytes)
