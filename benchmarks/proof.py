"""The least seconds of a program's sharding problems, found in other ways than the planner's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from passes.cluster import Cluster
from passes.errors import NoLegalPlanError
from passes.intra_op import assemble, layouts
from passes.placement import group
from passes.sharding import Resharder
from passes.solver import Floats, ShardingProblem, SolverOptions, solve
from passes.solver.elimination import Factors
from passes.solver.sums import Reduced
from passes.step import Step

EXACT = 1e-6
"""The relative gap of a proof."""

_TINY = 2e6
"""The most answers of a problem that are all tried."""

_ORDERED = 400
"""The most nodes of a problem for which an order of elimination is computed, which is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A proof that no answer takes less than `bound` seconds and one takes `objective`; `way` says how."""

    objective: float
    bound: float
    way: str

    def __or__(self, other: Proof) -> Proof:
        """The tighter proof that two proofs of one problem make together."""
        return Proof(
            objective=min(self.objective, other.objective),
            bound=min(max(self.bound, other.bound), self.objective, other.objective),
            way=f"{self.way}, {other.way}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Nodes with a choice, their strategies, and entries of the tables that would eliminate them unpruned."""

    nodes: int
    strategies: int
    entries: float


def problems(step: Step, cluster: Cluster, max_axes: int = 2) -> Iterator[ShardingProblem]:
    """The sharding problem of a step on every mesh that `Auto` tries."""
    grouping = group(step.graph)
    for mesh in layouts(cluster, cluster.n_devices, max_axes):
        yield assemble(step.graph, mesh, grouping, Resharder(mesh), step.state_pairs, regather=False).problem


def size(problem: ShardingProblem) -> Size:
    """The size of a problem."""
    counts = [int(np.isfinite(costs).sum()) for costs in problem.seconds]
    open_nodes = sum(count > 1 for count in counts)
    entries = Factors(problem).order.entries() if open_nodes <= _ORDERED and min(counts) else math.nan
    return Size(nodes=open_nodes, strategies=sum(counts), entries=entries)


def proven(given: Sequence[ShardingProblem], at_most: float, solver: str | None, seconds: float | None) -> Proof:
    """The proof of the least seconds over all of the problems, or that none takes less than `at_most`.

    Every answer is tried where there are few. Else each problem is solved untied to a gap of `EXACT`; one that is left
    open is given whole to a `solver` of PuLP, if one is named, for so many `seconds`.
    """
    proofs: list[Proof] = []
    for problem in given:
        upper = min([at_most * (1 - EXACT), *(proof.objective for proof in proofs)])
        try:
            proofs.append(_proven(problem, upper, solver, seconds))
        except NoLegalPlanError:
            continue
    methods = dict.fromkeys(method for proof in proofs for method in proof.way.split(", "))
    return Proof(
        objective=min(proof.objective for proof in proofs),
        bound=min(proof.bound for proof in proofs),
        way=", ".join(methods),
    )


def _proven(problem: ShardingProblem, upper: float, solver: str | None, seconds: float | None) -> Proof:
    if math.prod(int(np.isfinite(costs).sum()) for costs in problem.seconds) <= _TINY:
        minimum = brute_force(problem)
        return Proof(objective=minimum, bound=minimum, way="all tried")
    answer = solve(problem, SolverOptions(tie_radius=None, gap=EXACT), upper)
    proof = Proof(objective=answer.objective, bound=answer.bound, way="untied")
    if solver is None or proof.bound >= min(upper, proof.objective * (1 - EXACT)):
        return proof
    options = SolverOptions(solver=solver, gap=EXACT, time_limit=seconds)
    answer = solve(problem, options, known=[answer.choice])
    return proof | Proof(objective=answer.objective, bound=answer.bound, way=solver)


def brute_force(problem: ShardingProblem) -> float:
    """The least seconds of all answers to a tiny problem. Raises NoLegalPlanError if there is none."""
    allowed = [np.flatnonzero(np.isfinite(costs)) for costs in problem.seconds]
    places = np.unravel_index(
        np.arange(math.prod(indices.size for indices in allowed)), [indices.size for indices in allowed]
    )
    chosen = [indices[place] for indices, place in zip(allowed, places, strict=True)]
    total = np.sum([costs[choice] for costs, choice in zip(problem.seconds, chosen, strict=True)], axis=0)
    for edges in problem.groups.values():
        reduced, costs = Reduced(), list[Floats]()
        for edge in edges:  # in the order in which a sum is reduced for one of them
            row, column = edge.before[chosen[edge.source]], edge.after[chosen[edge.target]]
            costs.append(edge.weight * reduced.seconds(edge.sums, row, column, edge.seconds[row, column]))
        for label in dict.fromkeys(label for edge in edges for label in edge.labels):
            paid = np.zeros(total.size)  # once, whichever readers want it
            for edge, seconds in zip(reversed(edges), reversed(costs), strict=True):
                wants = np.array([other == label for other in edge.labels])[edge.after[chosen[edge.target]]]
                paid = np.where(wants, seconds, paid)
            total += paid
    minimum = float(total.min(initial=np.inf))
    if not math.isfinite(minimum):
        raise NoLegalPlanError("no combination of strategies is legal")
    return minimum
