"""A GraphProblem that shrinks step by step, each of which is remembered: what the rules of `reductions` change."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices, Pair, Usage
from passes.errors import NoLegalPlanError

Bools = NDArray[np.bool_]
Items = dict[tuple[int, int], Floats]
"""The usages of one node by (first time, end): bytes per strategy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """`node` takes `table[positions of the parents' strategies]`; strategies by their first numbers."""

    node: int
    parents: tuple[int, ...]
    table: Indices
    kept: tuple[Indices, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """`problem` is left of a larger one: its answers plus `constant` cost what their expansions do."""

    problem: GraphProblem
    constant: float
    nodes: tuple[int, ...]
    kept: tuple[Indices, ...]
    steps: tuple[Step, ...]
    size: int

    def expand(self, choice: Sequence[int] | Indices) -> tuple[int, ...]:
        """The answer of the larger problem that `choice` stands for."""
        full = np.full(self.size, -1, dtype=np.intp)
        for node, kept, c in zip(self.nodes, self.kept, choice, strict=True):
            full[node] = kept[c]
        for step in reversed(self.steps):
            at = [int(np.flatnonzero(k == full[p])[0]) for p, k in zip(step.parents, step.kept, strict=True)]
            full[step.node] = step.table[tuple(at)]
        return tuple(full.tolist())


class Shrinking:
    """A problem while it shrinks; strategies are kept in their first order.

    What changes is looked at again: nodes in the `queue` by all rules, those that are `stale` by dominance.
    """

    def __init__(self, problem: GraphProblem) -> None:
        self.size = len(problem.costs)
        self.costs = [node_costs.astype(np.float64) for node_costs in problem.costs]
        self.kept: list[Indices] = [np.arange(node_costs.size) for node_costs in problem.costs]
        self.around: list[dict[int, Floats]] = [{} for _ in problem.costs]
        self.fresh: list[set[int]] = [set() for _ in problem.costs]
        self.items: list[Items] = [{} for _ in problem.costs]
        self.alive = [True] * self.size
        self.limits = problem.limits.astype(np.float64)
        self.constant = 0.0
        self.changes = 0
        self.steps: list[Step] = []
        self.queue: deque[int] = deque(range(self.size))
        self.queued = [True] * self.size
        self.stale = [True] * self.size
        for edge in problem.edges:
            self.join(edge.source, edge.target, edge.costs)
        for usage in problem.usages:
            if usage.start < usage.end:
                self.occupy(usage.node, usage.start, usage.end, usage.nbytes.astype(np.float64))

    def shrink_times(self) -> None:
        """Drops usages that no choice changes, strategies that never fit, and times at which no limit can bind."""
        least = np.zeros(self.limits.size + 1)
        for items in self.items:
            for (start, end), nbytes in items.items():
                least[start] += nbytes.min()
                least[end] -= nbytes.min()
        self.limits = self.limits - np.cumsum(least)[:-1]
        if (self.limits < 0).any():
            raise NoLegalPlanError(
                f"no choice of strategies fits: what every one occupies at least exceeds the limit by "
                f"{-self.limits.min():.0f} bytes; give more memory"
            )
        for node, items in enumerate(self.items):
            self.items[node] = {at: g - g.min() for at, g in items.items() if g.min() < g.max()}
        for node, items in enumerate(self.items):
            keep = np.ones(self.costs[node].size, dtype=np.bool_)
            for (start, end), nbytes in items.items():
                keep &= nbytes <= self.limits[start:end].min()
            if not keep.all():
                self.restrict(node, keep)
        place = _places(self.limits, [(*at, g) for items in self.items for at, g in items.items()])
        self.limits = self.limits[np.flatnonzero(np.diff(place))]
        for node, items in enumerate(self.items):
            self.items[node] = {}
            for (start, end), nbytes in items.items():
                if place[start] < place[end]:
                    self.occupy(node, int(place[start]), int(place[end]), nbytes)
            if len(self.items[node]) != len(items):
                self.push(node)

    def result(self) -> Reduction:
        """The reduced problem, its nodes numbered anew."""
        nodes = [n for n in range(self.size) if self.alive[n]]
        number = {n: at for at, n in enumerate(nodes)}
        edges = [
            Pair(source=number[u], target=number[v], costs=np.ascontiguousarray(costs))
            for u in nodes
            for v, costs in self.around[u].items()
            if u < v
        ]
        usages = [Usage(node=number[n], start=s, end=e, nbytes=g) for n in nodes for (s, e), g in self.items[n].items()]
        problem = GraphProblem(
            costs=tuple(self.costs[n] for n in nodes), edges=tuple(edges), usages=tuple(usages), limits=self.limits
        )
        kept = tuple(self.kept[n] for n in nodes)
        return Reduction(
            problem=problem,
            constant=self.constant,
            nodes=tuple(nodes),
            kept=kept,
            steps=tuple(self.steps),
            size=self.size,
        )

    def restrict(self, node: int, keep: Bools) -> None:
        """Keeps the strategies of a node for which `keep` [strategies] holds."""
        self.kept[node], self.costs[node] = self.kept[node][keep], self.costs[node][keep]
        self.items[node] = {at: g[keep] for at, g in self.items[node].items()}
        for other in self.around[node]:
            self.put(node, other, self.around[node][other][keep])
        self.push(node)

    def join(self, node: int, other: int, costs: Floats) -> None:
        """Adds seconds [strategies of node, of other] to the edge between two nodes."""
        known = self.around[node].get(other)
        self.put(node, other, costs if known is None else known + costs)

    def put(self, node: int, other: int, costs: Floats) -> None:
        """Sets the seconds of the edge between two nodes."""
        self.around[node][other], self.around[other][node] = costs, costs.T
        self.fresh[node].add(other)
        self.fresh[other].add(node)
        self.push(node)
        self.push(other)

    def cut(self, node: int, neighbour: int) -> None:
        """Takes the edge between two nodes away."""
        for end, other in ((node, neighbour), (neighbour, node)):
            del self.around[end][other]
            self.fresh[end].discard(other)
            self.push(end)

    def drop(self, node: int) -> None:
        """Takes a node away, with its edges and usages."""
        self.alive[node] = False
        for other in list(self.around[node]):
            self.cut(node, other)
        self.items[node] = {}

    def occupy(self, node: int, start: int, end: int, nbytes: Floats) -> None:
        """Adds bytes [strategies] that a node holds between two times."""
        known = self.items[node].get((start, end))
        self.items[node][start, end] = nbytes if known is None else known + nbytes

    def push(self, node: int) -> None:
        """Puts a node that has changed into the queue."""
        self.changes += 1
        self.stale[node] = True
        if not self.queued[node]:
            self.queued[node] = True
            self.queue.append(node)


def _places(limits: Floats, items: Sequence[tuple[int, int, Floats]]) -> Indices:
    """[times + 1] the number of each time among those that matter.

    A time matters if all usages at their largest exceed its limit. Between neighbours, one whose usages all live at the
    other too, under no smaller limit, is implied by it.
    """
    most = np.zeros(limits.size + 1)
    starts, ends = np.zeros(limits.size + 1, dtype=np.bool_), np.zeros(limits.size + 1, dtype=np.bool_)
    for start, end, nbytes in items:
        most[start] += nbytes.max()
        most[end] -= nbytes.max()
        starts[start] = ends[end] = True
    matters = np.cumsum(most)[:-1] > limits
    stack: list[tuple[int, bool, bool]] = []  # the time; whether usages start, end between the one before and it
    opened = closed = False
    for time in range(limits.size):
        opened, closed = opened or bool(starts[time]), closed or bool(ends[time])
        if not matters[time]:
            continue
        while stack and not closed and limits[stack[-1][0]] >= limits[time]:
            _, also_opened, also_closed = stack.pop()
            opened, closed = opened or also_opened, closed or also_closed
        if not stack or opened or limits[time] < limits[stack[-1][0]]:
            stack.append((time, opened, closed))
            opened = closed = False
    kept = np.zeros(limits.size, dtype=np.intp)
    kept[[time for time, _, _ in stack]] = 1
    return np.concatenate([[0], np.cumsum(kept)])
