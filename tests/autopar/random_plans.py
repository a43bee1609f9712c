"""Random legal plans: whatever the search might choose."""

from dataclasses import dataclass, replace

import numpy as np

from autopar import Planned
from passes.intra_op import MeshProblems, cheapest_plan, named
from passes.solver import SolverOptions


@dataclass(frozen=True)
class Dice:
    """A planner that gives every legal strategy a random price, and reshardings none."""

    seed: int
    sizes: tuple[int, ...]

    def plan(self, step, cluster, options):
        rng = np.random.default_rng(self.seed)

        def roll(assembly):
            priced = tuple(
                np.where(np.isfinite(s), rng.random(s.size) * 1e-3, np.inf) for s in assembly.problem.seconds
            )
            edges = tuple(
                replace(edge, seconds=np.where(np.isfinite(edge.seconds), 0.0, np.inf))
                for edge in assembly.problem.edges
            )
            return replace(assembly, problem=replace(assembly.problem, seconds=priced, edges=edges))

        solver, mesh = SolverOptions(tie_radius=None), named(cluster, *zip("xyz", self.sizes, strict=False))
        return Planned.of(cheapest_plan("dice", MeshProblems(step=step, restrict=roll), [mesh], solver), step)
