"""A GraphProblem made smaller without changing its optimum, and the way back.

Rules, each applied until none changes anything:

- a strategy that costs infinity, or has no possible partner across some edge, goes (`_prune`);
- a node of one strategy becomes part of its neighbours' costs (`_settle`);
- an edge whose costs are a sum a_i + b_j becomes part of its nodes' costs (`_separate`);
- a node whose best strategy is a function of its only neighbour's, in cost and in every usage, folds into that
  neighbour, and so does a node whose strategy is fixed by a neighbour's through forbidden pairs (`_fold`);
- a node of two neighbours that occupies nothing of note becomes an edge between them (`_bridge`);
- a strategy that another replaces at no more cost and no more usage, whatever the neighbours do, goes (`_dominate`);
- usages that no choice changes, strategies that never fit, and times at which no limit can bind or that another time
  implies, go (`shrink_times`).

Reference: the reductions of partitioned Boolean quadratic problems R1, R2 and RN (Scholz and Eckstein, LCTES 2002)
and soft arc consistency with dead-end elimination (de Givry, Prestwich and O'Sullivan, CP 2013), with usages added.
"""

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

_SMALL_TABLE = 4096
_DOMINANCE_WORK = 4_000_000
_NARROW = 3
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
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
    steps: tuple[_Step, ...]
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


def reduce(problem: GraphProblem) -> Reduction:
    """An equivalent smaller problem. Raises NoLegalPlanError if no answer can be legal."""
    work = _Work(problem)
    work.run(dominate=False)
    work.shrink_times()
    for _ in range(_ROUNDS):
        before = work.changes
        work.run(dominate=True)
        work.shrink_times()
        if work.changes == before:
            break
    work.run(dominate=False)
    return work.result()


class _Work:
    """The problem while it shrinks; strategies are kept in their first order."""

    def __init__(self, problem: GraphProblem) -> None:
        self.size = len(problem.costs)
        self.costs = [own.astype(np.float64) for own in problem.costs]
        self.kept: list[Indices] = [np.arange(own.size) for own in problem.costs]
        self.around: list[dict[int, Floats]] = [{} for _ in problem.costs]
        self.fresh: list[set[int]] = [set() for _ in problem.costs]
        self.items: list[Items] = [{} for _ in problem.costs]
        self.alive = [True] * self.size
        self.limits = problem.limits.astype(np.float64)
        self.constant = 0.0
        self.changes = 0
        self.steps: list[_Step] = []
        self.queue: deque[int] = deque(range(self.size))
        self.queued = [True] * self.size
        self.stale = [True] * self.size
        for edge in problem.edges:
            self._join(edge.source, edge.target, edge.costs)
        for usage in problem.usages:
            if usage.start < usage.end:
                self._occupy(usage.node, usage.start, usage.end, usage.nbytes.astype(np.float64))

    def run(self, *, dominate: bool) -> None:
        """Applies every rule until none changes anything."""
        while True:
            while self.queue:
                node = self.queue.popleft()
                self.queued[node] = False
                if self.alive[node]:
                    self._simplify(node)
            if not dominate:
                return
            for node in np.flatnonzero(self.alive).tolist():
                if self.stale[node]:
                    self.stale[node] = False
                    self._dominate(node)
            if not self.queue:
                return

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
                self._restrict(node, keep)
        place = _places(self.limits, [(*at, g) for items in self.items for at, g in items.items()])
        self.limits = self.limits[np.flatnonzero(np.diff(place))]
        for node, items in enumerate(self.items):
            self.items[node] = {}
            for (start, end), nbytes in items.items():
                if place[start] < place[end]:
                    self._occupy(node, int(place[start]), int(place[end]), nbytes)
            if len(self.items[node]) != len(items):
                self._push(node)

    def result(self) -> Reduction:
        """What is left, its nodes numbered anew."""
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

    def _simplify(self, node: int) -> None:
        self._prune(node)
        if self.costs[node].size == 1:
            self._settle(node)
            return
        self._separate(node)
        degree = len(self.around[node])
        heavy = [g for g in self.items[node].values() if g.min() < g.max()] if degree <= 2 else []
        if degree == 0:
            best = _function(self.costs[node][:, None], heavy)
            if best is not None:
                self._restrict(node, np.arange(self.costs[node].size) == best[0])
            return
        if degree == 1:
            ((parent, costs),) = self.around[node].items()
            best = _function(self.costs[node][:, None] + costs, heavy)
            if best is not None:
                self._fold(node, parent, best)
                return
        fixed = self._fixed_by_a_neighbour(node)
        self.fresh[node].clear()
        if fixed is not None:
            self._fold(*fixed)
        elif degree == 2 and not heavy:
            self._bridge(node)

    def _prune(self, node: int) -> None:
        keep = np.isfinite(self.costs[node])
        for other in self.fresh[node]:
            keep &= np.isfinite(self.around[node][other]).any(axis=1)
        if not keep.any():
            raise NoLegalPlanError(f"no combination of strategies is legal: node {node} has none left")
        if not keep.all():
            self._restrict(node, keep)

    def _settle(self, node: int) -> None:
        for other, costs in self.around[node].items():
            self.costs[other] = self.costs[other] + costs[0]
        self.constant += float(self.costs[node][0])
        for (start, end), nbytes in self.items[node].items():
            self.limits[start:end] -= nbytes[0]
        self.steps.append(_Step(node=node, parents=(), table=self.kept[node][0], kept=()))
        self._drop(node)

    def _separate(self, node: int) -> None:
        for other in list(self.fresh[node]):
            costs = self.around[node][other]
            if not np.isfinite(costs[0]).all() or not np.isfinite(costs[:, 0]).all():
                continue
            if (costs == costs[:, :1] + (costs[:1] - costs[0, 0])).all():
                self.costs[node] = self.costs[node] + costs[:, 0]
                self.costs[other] = self.costs[other] + (costs[0] - costs[0, 0])
                self._cut(node, other)

    def _fixed_by_a_neighbour(self, node: int) -> tuple[int, int, Indices] | None:
        """(folding node, into which, its strategy by the other's), if forbidden pairs leave no choice."""
        for other in self.fresh[node]:
            possible = np.isfinite(self.around[node][other])
            rows, columns = possible.shape
            one = (possible.sum(axis=0) == 1).all()
            back = (possible.sum(axis=1) == 1).all()
            if one and back and len(self.around[node]) > len(self.around[other]):
                return other, node, possible.argmax(axis=1)
            if one and (columns <= rows or len(self.around[node]) <= _NARROW):
                return node, other, possible.argmax(axis=0)
            if back and (rows <= columns or len(self.around[other]) <= _NARROW):
                return other, node, possible.argmax(axis=1)
        return None

    def _fold(self, node: int, parent: int, best: Indices) -> None:
        costs = self.around[node][parent]
        self.costs[parent] = self.costs[parent] + self.costs[node][best] + costs[best, np.arange(best.size)]
        step = _Step(node=node, parents=(parent,), table=self.kept[node][best], kept=(self.kept[parent],))
        self.steps.append(step)
        items = self.items[node]
        others = [(other, costs) for other, costs in self.around[node].items() if other != parent]
        self._drop(node)
        for other, costs in others:
            self._join(parent, other, costs[best])
        for (start, end), nbytes in items.items():
            self._occupy(parent, start, end, nbytes[best])
        self._push(parent)

    def _bridge(self, node: int) -> None:
        (left, before), (right, after) = self.around[node].items()
        if self.costs[left].size * self.costs[right].size > _SMALL_TABLE:
            return
        total = self.costs[node][:, None, None] + before[:, :, None] + after[:, None, :]
        table = self.kept[node][total.argmin(axis=0)]
        kept = (self.kept[left], self.kept[right])
        self.steps.append(_Step(node=node, parents=(left, right), table=table, kept=kept))
        for (start, end), nbytes in self.items[node].items():
            self.limits[start:end] -= nbytes[0]
        self._drop(node)
        self._join(left, right, total.min(axis=0))

    def _dominate(self, node: int) -> None:
        own = self.costs[node]
        if own.size**2 * sum(self.costs[other].size for other in self.around[node]) > _DOMINANCE_WORK:
            return
        excess = own[:, None] - own[None, :]
        possible = np.ones(excess.shape, dtype=np.bool_)
        np.fill_diagonal(possible, False)
        for nbytes in self.items[node].values():
            possible &= nbytes[:, None] <= nbytes[None, :]
        with np.errstate(invalid="ignore"):
            for costs in self.around[node].values():
                if not (possible & (excess <= 0)).any() and len(self.around[node]) > _NARROW:
                    break
                excess += np.fmax.reduce(costs[:, None, :] - costs[None, :, :], axis=2)
            else:
                possible &= excess <= 0
                self._drop_dominated(node, possible)

    def _drop_dominated(self, node: int, better: Bools) -> None:
        keep = np.ones(len(better), dtype=np.bool_)
        for strategy in range(len(better)):
            if (better[:, strategy] & keep).any():
                keep[strategy] = False
        if not keep.all():
            self._restrict(node, keep)

    def _restrict(self, node: int, keep: Bools) -> None:
        self.kept[node], self.costs[node] = self.kept[node][keep], self.costs[node][keep]
        self.items[node] = {at: g[keep] for at, g in self.items[node].items()}
        for other in self.around[node]:
            self._put(node, other, self.around[node][other][keep])
        self._push(node)

    def _join(self, left: int, right: int, costs: Floats) -> None:
        known = self.around[left].get(right)
        self._put(left, right, costs if known is None else known + costs)

    def _put(self, left: int, right: int, costs: Floats) -> None:
        self.around[left][right], self.around[right][left] = costs, costs.T
        self.fresh[left].add(right)
        self.fresh[right].add(left)
        self._push(left)
        self._push(right)

    def _cut(self, left: int, right: int) -> None:
        for one, other in ((left, right), (right, left)):
            del self.around[one][other]
            self.fresh[one].discard(other)
            self._push(one)

    def _drop(self, node: int) -> None:
        self.alive[node] = False
        for other in list(self.around[node]):
            self._cut(node, other)
        self.items[node] = {}

    def _occupy(self, node: int, start: int, end: int, nbytes: Floats) -> None:
        known = self.items[node].get((start, end))
        self.items[node][start, end] = nbytes if known is None else known + nbytes

    def _push(self, node: int) -> None:
        self.changes += 1
        self.stale[node] = True
        if not self.queued[node]:
            self.queued[node] = True
            self.queue.append(node)


def _function(table: Floats, heavy: Sequence[Floats]) -> Indices | None:
    """The best row of every column in cost and in all usages at once, or None if some column has none."""
    if not heavy:
        return table.argmin(axis=0)
    tied = table == table.min(axis=0)
    best = np.where(tied, np.sum(heavy, axis=0)[:, None], np.inf).argmin(axis=0)
    finite = np.isfinite(table)
    for nbytes in heavy:
        if (nbytes[best] > np.where(finite, nbytes[:, None], np.inf).min(axis=0)).any():
            return None
    return best


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
