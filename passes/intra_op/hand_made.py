"""Answers by hand-made plans, such as data parallelism or ZeRO: the search starts from them, and is never worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from passes.cluster import Mesh
from passes.errors import PlanningError
from passes.intra_op.assembly import Assembly
from passes.intra_op.memory_limit import Fitted
from passes.intra_op.mesh_memory import MeshMemory
from passes.intra_op.mesh_problems import MeshProblems, Solved
from passes.intra_op.offloading import restricted_to
from passes.intra_op.restrictions import HandMade, Restriction
from passes.limits import Limits
from passes.solver import Answer, SolverOptions, solve

_ROUGHLY = 1e-2
"""The relative gap to which hand-made plans are solved."""

SURELY = 1.5
"""The factor of the limit from which a hand-made plan is not looked at, as it is expected to need that much.

Expected bytes are the least that may be live, scaled by what the first answer's peak was to its own. They are 0.44 to
1.39 times the peaks of 247 hand-made plans, 0.87 at the median and 1.20 at most for 95 % of them, so that none that
fits is left out; 1.25 would leave out 9 (`python -m benchmarks.expected_peaks`: nine models of the zoo in their least
shapes, as they are and in 2 microbatches, by either compiler's model). Before a limit is refused, all that was left out
is looked at: `MeshSearch.cheapest_left_out`.
"""

HandMadePlans = Callable[[Mesh], Iterable[HandMade]]
"""A function from a mesh to the hand-made plans that are possible there."""


@dataclass(slots=True, kw_only=True)
class HandMadeAnswers:
    """The answers that hand-made `plans` have on meshes, each solved once.

    `left_out` says whether some were not looked at, as they were not expected to fit.
    """

    plans: HandMadePlans
    options: SolverOptions
    known: dict[tuple[Mesh, int], Answer | None] = field(default_factory=dict[tuple[Mesh, int], "Answer | None"])
    left_out: bool = False

    def answers(
        self,
        problems: MeshProblems,
        solved: Solved,
        limit: float = math.inf,
        surely: float = SURELY,
        cutoff: float = math.inf,
    ) -> Iterator[tuple[Solved, Answer]]:
        """The hand-made answers on a mesh that may need no more than `limit` bytes, each with the problem that it
        answers.

        Left out are answers that are expected to need `surely` times the limit, and those that hold more than the limit
        throughout the step. One of `cutoff` seconds or more need not be the best of its kind.
        """
        for number, (restrict, regather) in enumerate(self.plans(solved.assembly.mesh)):
            is_twin = solved.assembly.regather
            base = solved if is_twin == regather else None if is_twin else problems.twin(solved)
            if base is None:
                continue
            key = base.assembly.mesh, number
            if key not in self.known:
                restricted = _restricted(restrict, base.assembly)
                if restricted and math.isfinite(limit):
                    if restricted.problem.least(problems.resident(base)) > limit:
                        continue
                    if problems.expected_nbytes(base, restricted) > surely * limit:
                        self.left_out = True
                        continue
                self.known[key] = self._solved(restricted, cutoff)
            if (answer := self.known[key]) is not None:
                yield base, replace(answer, bound=min(solved.answer.bound, answer.objective), status="near optimal")

    def fitting(
        self,
        problems: MeshProblems,
        meshes: Sequence[Solved],
        limits: Limits,
        cutoff: float,
        surely: float = SURELY,
    ) -> Fitted | None:
        """The cheapest hand-made answer that keeps the limits and takes less than `cutoff` seconds; None if there is
        none. One that offloads state has to keep the limit of searched plans.

        Where one does not fit, what is live at its peak may show that others do not, either.
        """
        best: Fitted | None = None
        for solved in meshes:
            if solved.answer.bound >= cutoff:
                continue
            for base, answer in self.answers(problems, solved, limits.hand_made, surely, cutoff):
                if answer.objective >= cutoff:
                    continue
                point = problems.peak(base, answer.choice)
                if point.nbytes > limits.hand_made:
                    answer = MeshMemory(problems=problems, solved=base, limit=limits.searched).settled(answer)
                    point = problems.peak(base, answer.choice)
                limit = limits.searched if base.assembly.offloaded(answer.choice) else limits.hand_made
                fits = point.nbytes <= limit
                if fits and answer.objective < cutoff:
                    best = Fitted(solved=base, stated=base.assembly.problem, answer=answer, nbytes=point.nbytes)
                    cutoff = answer.objective
                elif not fits:
                    problems.note_peak(base, answer.choice, point, hand_made=True)
        return best

    def _solved(self, restricted: Assembly | None, cutoff: float) -> Answer | None:
        if restricted is None:
            return None
        try:
            return solve(restricted.problem, replace(self.options, gap=_ROUGHLY), cutoff, close=False)
        except PlanningError:
            return None


def _restricted(restrict: Restriction, assembly: Assembly) -> Assembly | None:
    """A mesh's problem with the strategies of a hand-made plan alone; None where that plan is not possible."""
    try:
        if assembly.on_device is None:
            return restrict(assembly)
        return restricted_to(assembly, restrict(assembly.on_device))
    except PlanningError:  # a batch that the axis does not divide, say
        return None
