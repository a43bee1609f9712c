"""The options of a search for strategies: limits of gap and work, how nodes are merged, and whose solver it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from passes.errors import PlanningError, explain
from passes.solver.problem import ShardingProblem

GAP = 1e-4
"""The relative gap to which a problem is solved: far less than what seconds are predicted to, and most relaxations are
tight to it, so that less saves no time (`python -m benchmarks.settings`)."""

RADIUS = 2
"""Rounds of colour refinement after which nodes of one colour are made one: edges around a node up to which two equal
ones see the same. On a GPT of 4 layers, tied, 1 leaves a gap that is wider by 0.004 % with 3 % less work, and 4 takes
4 % more work and finds the same (`python -m benchmarks.settings`; `benchmarks.tying` compares tying with none)."""

LUMPY = 1e-3
"""The gap at which a program with budgets or many edges may end: less takes long. On 32 layers of LLaMA-3, .05 % is
left after .1 s and .02 % after 2.5 s (`python -m benchmarks.planning --mesh 8x8`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """The limits of a search: a relative `gap` between answer and bound, or amounts of work.

    `time_limit` in seconds of one solve is another limit, under which plans depend on the machine; None for none.
    `tie_radius` is the rounds of colour refinement that make equal nodes one; None takes every node apart, and so does
    a problem of up to `untied` edges: there the merged relaxation takes as long, its answers are dearer and its bound
    is lower (`python -m benchmarks.tying`).

    `solver` names any solver that PuLP finds (`"cbc"`, `"highs"`, `"gurobi"`, ...), which is then given the whole
    integer program in the place of our own search.
    """

    solver: str | None = None
    time_limit: float | None = None
    gap: float = GAP
    tie_radius: int | None = RADIUS
    untied: int = 1_000

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.solver), str | None):
            rule = "should be the name of a solver that PuLP finds, or None"
            raise PlanningError(explain(f"SolverOptions(solver={self.solver!r:.40})", rule, "", 'write, say, "highs"'))
        number = int | float
        for name, kinds in (
            ("gap", number),
            ("time_limit", number | None),
            ("tie_radius", int | None),
            ("untied", int),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds) or not (value is None or value >= 0):
                rule = f"should be a {'number' if isinstance(0.5, kinds) else 'whole number'} from 0"
                raise PlanningError(explain(f"SolverOptions({name}={value!r:.40})", rule, "", "leave it out"))

    def radius(self, problem: ShardingProblem) -> int | None:
        """The rounds that make nodes of a problem one, None where every node stays apart."""
        return None if len(problem.edges) <= self.untied else self.tie_radius

    def gap_of(self, problem: ShardingProblem) -> float:
        """The gap to which a problem is solved."""
        return max(self.gap, LUMPY) if problem.budgets else self.gap
