"""The reasons of a placement: what the next best ones would cost, and what rules out others.

Each placement that an input could have on the plan's mesh is pinned in turn, and the rest of the program is solved for
around it: the seconds of that are the price of the placement, not a guess from the operators next to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cluster import Mesh
from passes.errors import PlanMismatchError, PlanningError, explain
from passes.intra_op import Assembly, MeshProblems, Solved, pins
from passes.ir import TensorType
from passes.plan import Plan
from passes.sharding import ShardingSpec
from passes.solver import SolverOptions, solve
from passes.step import Step
from passes.text import quantities

ROUGH = 1e-2
"""The relative gap to which a program is solved around another placement, and so the accuracy of its price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another placement of some inputs: the seconds of a step by the best plan with it, and the peak bytes of one
    device.
    """

    spec: ShardingSpec
    seconds: float
    peak_nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """The inputs that a pattern names, their placement in a plan, and its rivals, cheapest first."""

    names: tuple[str, ...]
    type: TensorType
    spec: ShardingSpec
    mesh: Mesh
    seconds: float
    peak_nbytes: int
    limit_nbytes: float
    rivals: tuple[Rival, ...]
    uneven: tuple[str, ...]

    def text(self) -> str:
        """The reasons as text."""
        n = len(self.names)
        subject = self.names[0] if n == 1 else f"{self.names[0]} and {quantities.count(n - 1, 'array')} like it"
        fits = [rival for rival in self.rivals if rival.peak_nbytes <= self.limit_nbytes]
        peak = quantities.nbytes(self.peak_nbytes)
        over = (
            ""
            if self.peak_nbytes <= self.limit_nbytes
            else f", more than the {quantities.nbytes(self.limit_nbytes)} planned with"
        )
        faster = [rival for rival in self.rivals if rival.seconds < (1 - ROUGH) * self.seconds]
        lines = [
            f"{subject}, {self.type}, lies as {self.spec} on mesh {self.mesh}:",
            f"  {_meaning(self.spec, self.type, self.mesh)}.",
            f"A step takes {quantities.seconds(self.seconds)} and {peak} of a device{over}.",
            _why(self.rivals, fits, faster, self.seconds, self.limit_nbytes),
            *(f"  {self._against(rival)}" for rival in list(dict.fromkeys((*faster, *fits)))[:5]),
        ]
        if self.uneven:
            lines.append(f"Ruled out by divisibility: {'; '.join(self.uneven)}.")
        return "\n".join(filter(None, lines))

    def _against(self, rival: Rival) -> str:
        """A rival compared with the placement that was chosen, as text."""
        near = abs(rival.seconds - self.seconds) <= ROUGH * self.seconds
        change = quantities.change(self.seconds, rival.seconds)
        more = rival.peak_nbytes - self.peak_nbytes
        memory = f"{quantities.nbytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "as much memory"
        over = ", over the limit" if rival.peak_nbytes > self.limit_nbytes else ""
        words = f"{change}, as good" if near else change
        return f"{rival.spec}: {quantities.seconds(rival.seconds)} ({words}), {memory}{over}"


def _why(rivals: Sequence[Rival], fits: Sequence[Rival], faster: Sequence[Rival], seconds: float, limit: float) -> str:
    if faster and all(rival.peak_nbytes > limit for rival in faster):
        return f"What binds is memory: a device may need {quantities.nbytes(limit)}. Over that, this is faster:"
    if faster:
        return "Faster, as the plan is hand-made, pinned, edited or of a search that ended early:"
    if not rivals:
        return "Nothing else can be: no other placement of it is legal here."
    if not fits:
        least = quantities.nbytes(min(rival.peak_nbytes for rival in rivals))
        return f"Nothing else can be: with any other placement a device needs {least} or more, over the limit."
    slower = [rival for rival in fits if rival.seconds > (1 + ROUGH) * seconds]
    least = "No other placement of it makes the step faster" + ("" if slower else ", and none slower by more than 1 %")
    return f"{least}. Solving the rest again around others:"


def _meaning(spec: ShardingSpec, type: TensorType, mesh: Mesh) -> str:
    """The meaning of a placement, as text."""
    cuts = [
        f"dimension {dim} of {type.shape[dim]} is cut into {math.prod(map(mesh.axis_size, axes))} over {'+'.join(axes)}"
        for dim, axes in enumerate(spec.dims)
        if axes
    ]
    local = quantities.nbytes(spec.local_nbytes(type, mesh))
    return f"{', '.join(cuts)}; each device has {local}" if cuts else f"it is whole on every device, {local}"


def reasons(
    step: Step, plan: Plan, pattern: str, limit_nbytes: float, tell: Callable[[str], None] = lambda words: None
) -> Reasons:
    """The reasons for the placement of inputs that a pattern names. Raises PlanningError where it names none.

    `step` is the variant that the plan is of.
    """
    positions = _named(plan, pattern)
    graph, mesh = step.graph, plan.mesh
    specs = {plan.inputs[i] for i in positions}
    types = {graph.types[graph.inputs[i]] for i in positions}
    if len(specs) > 1 or len(types) > 1:
        several = [
            f"{pins.path_of(plan.input_names[i])} {graph.types[graph.inputs[i]]} {plan.inputs[i]}" for i in positions
        ]
        listed = "\n  ".join(several[:6] + ["..."] * (len(several) > 6))
        rule = "these are of several types or placements"
        raise PlanningError(explain(repr(pattern), rule, listed, "name one of them, or some that are alike"))
    (spec,), (type,) = specs, types
    problems = MeshProblems(step=step)
    assembly = problems.assembled(mesh, regather=plan.regather)
    rivals: list[Rival] = []
    every = [s for s in _possible(assembly, graph.inputs[positions[0]]) if s != spec and not s.partial]
    for number, other in enumerate(every):
        tell(f"solve with {other}, {number + 1} of {len(every)}")
        try:
            restricted = pins.pinned(assembly, dict.fromkeys(positions, other))
            answer = solve(restricted.problem, SolverOptions(gap=ROUGH), close=False)
        except PlanningError:
            continue
        solved = replace(Solved.unsolved(restricted), answer=answer)
        peak = problems.peak(solved, answer.choice).nbytes
        rivals.append(Rival(spec=other, seconds=answer.objective, peak_nbytes=peak))
    return Reasons(
        names=tuple(plan.input_names[i] for i in positions),
        type=type,
        spec=spec,
        mesh=mesh,
        seconds=plan.step_seconds,
        peak_nbytes=plan.peak_nbytes,
        limit_nbytes=limit_nbytes,
        rivals=tuple(sorted(rivals, key=lambda rival: rival.seconds)),
        uneven=tuple(_uneven(type, mesh)),
    )


def _named(plan: Plan, pattern: str) -> list[int]:
    positions = pins.matching(pattern, plan.input_names)
    if positions:
        return positions
    known = pins.guesses(pattern, plan.input_names)
    raise PlanMismatchError(explain(repr(pattern), "no input of the plan has such a name", known, "name one of them"))


def _possible(assembly: Assembly, value: int) -> list[ShardingSpec]:
    """The placements that an input can have in a problem, each once."""
    root, problem = assembly.root, assembly.problem
    site = root.sites.get(value)
    if site is None:
        return []
    finite = np.isfinite(problem.seconds[site.node])
    return list(dict.fromkeys(spec for spec, is_legal in zip(site.specs, finite, strict=True) if is_legal))


def _uneven(type: TensorType, mesh: Mesh) -> list[str]:
    """The cuts that no axis of the mesh divides, as text."""
    return [
        f"{axis} of {mesh.axis_size(axis)} does not divide dimension {dim} of {size}"
        for dim, size in enumerate(type.shape)
        for axis in mesh.axes
        if size % mesh.axis_size(axis)
    ]
