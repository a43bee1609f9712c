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

from collections.abc import Sequence

import numpy as np

from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices
from benchmarks.iopddl.shrinking import Bools, Reduction, Shrinking, Step
from passes.errors import NoLegalPlanError

# Chosen; what half and double of them do is not recorded.

_SMALL_TABLE = 4096
"""Entries of an edge up to which a node of two neighbours becomes one."""

_DOMINANCE_WORK = 4_000_000
"""Pairs of a node's strategies, times strategies of its neighbours, up to which dominance is looked for."""

_NARROW = 3
"""Neighbours up to which a node folds into a larger one, and dominance is looked for to the end."""

_ROUNDS = 3
"""Rounds of all rules at most."""


def reduce(problem: GraphProblem) -> Reduction:
    """An equivalent smaller problem. Raises NoLegalPlanError if no answer can be legal."""
    work = Shrinking(problem)
    _apply(work, dominate=False)
    work.shrink_times()
    for _ in range(_ROUNDS):
        before = work.changes
        _apply(work, dominate=True)
        work.shrink_times()
        if work.changes == before:
            break
    _apply(work, dominate=False)
    return work.result()


def _apply(work: Shrinking, *, dominate: bool) -> None:
    """Applies every rule until none changes anything."""
    while True:
        while work.queue:
            node = work.queue.popleft()
            work.queued[node] = False
            if work.alive[node]:
                _simplify(work, node)
        if not dominate:
            return
        for node in np.flatnonzero(work.alive).tolist():
            if work.stale[node]:
                work.stale[node] = False
                _dominate(work, node)
        if not work.queue:
            return


def _simplify(work: Shrinking, node: int) -> None:
    _prune(work, node)
    if work.costs[node].size == 1:
        _settle(work, node)
        return
    _separate(work, node)
    degree = len(work.around[node])
    heavy = [g for g in work.items[node].values() if g.min() < g.max()] if degree <= 2 else []
    if degree == 0:
        best = _function(work.costs[node][:, None], heavy)
        if best is not None:
            work.restrict(node, np.arange(work.costs[node].size) == best[0])
        return
    if degree == 1:
        ((parent, costs),) = work.around[node].items()
        best = _function(work.costs[node][:, None] + costs, heavy)
        if best is not None:
            _fold(work, node, parent, best)
            return
    fixed = _fixed_by_a_neighbour(work, node)
    work.fresh[node].clear()
    if fixed is not None:
        _fold(work, *fixed)
    elif degree == 2 and not heavy:
        _bridge(work, node)


def _prune(work: Shrinking, node: int) -> None:
    keep = np.isfinite(work.costs[node])
    for other in work.fresh[node]:
        keep &= np.isfinite(work.around[node][other]).any(axis=1)
    if not keep.any():
        raise NoLegalPlanError(f"no combination of strategies is legal: node {node} has none left")
    if not keep.all():
        work.restrict(node, keep)


def _settle(work: Shrinking, node: int) -> None:
    for other, costs in work.around[node].items():
        work.costs[other] = work.costs[other] + costs[0]
    work.constant += float(work.costs[node][0])
    for (start, end), nbytes in work.items[node].items():
        work.limits[start:end] -= nbytes[0]
    work.steps.append(Step(node=node, parents=(), table=work.kept[node][0], kept=()))
    work.drop(node)


def _separate(work: Shrinking, node: int) -> None:
    for other in list(work.fresh[node]):
        costs = work.around[node][other]
        if not np.isfinite(costs[0]).all() or not np.isfinite(costs[:, 0]).all():
            continue
        if (costs == costs[:, :1] + (costs[:1] - costs[0, 0])).all():
            work.costs[node] = work.costs[node] + costs[:, 0]
            work.costs[other] = work.costs[other] + (costs[0] - costs[0, 0])
            work.cut(node, other)


def _fixed_by_a_neighbour(work: Shrinking, node: int) -> tuple[int, int, Indices] | None:
    """(folding node, into which, its strategy by the other's), if forbidden pairs leave no choice."""
    for other in work.fresh[node]:
        possible = np.isfinite(work.around[node][other])
        rows, columns = possible.shape
        is_single = (possible.sum(axis=0) == 1).all()
        back = (possible.sum(axis=1) == 1).all()
        if is_single and back and len(work.around[node]) > len(work.around[other]):
            return other, node, possible.argmax(axis=1)
        if is_single and (columns <= rows or len(work.around[node]) <= _NARROW):
            return node, other, possible.argmax(axis=0)
        if back and (rows <= columns or len(work.around[other]) <= _NARROW):
            return other, node, possible.argmax(axis=1)
    return None


def _fold(work: Shrinking, node: int, parent: int, best: Indices) -> None:
    costs = work.around[node][parent]
    work.costs[parent] = work.costs[parent] + work.costs[node][best] + costs[best, np.arange(best.size)]
    step = Step(node=node, parents=(parent,), table=work.kept[node][best], kept=(work.kept[parent],))
    work.steps.append(step)
    items = work.items[node]
    others = [(other, costs) for other, costs in work.around[node].items() if other != parent]
    work.drop(node)
    for other, costs in others:
        work.join(parent, other, costs[best])
    for (start, end), nbytes in items.items():
        work.occupy(parent, start, end, nbytes[best])
    work.push(parent)


def _bridge(work: Shrinking, node: int) -> None:
    (first, before), (second, after) = work.around[node].items()
    if work.costs[first].size * work.costs[second].size > _SMALL_TABLE:
        return
    total = work.costs[node][:, None, None] + before[:, :, None] + after[:, None, :]
    table = work.kept[node][total.argmin(axis=0)]
    kept = (work.kept[first], work.kept[second])
    work.steps.append(Step(node=node, parents=(first, second), table=table, kept=kept))
    for (start, end), nbytes in work.items[node].items():
        work.limits[start:end] -= nbytes[0]
    work.drop(node)
    work.join(first, second, total.min(axis=0))


def _dominate(work: Shrinking, node: int) -> None:
    node_costs = work.costs[node]
    if node_costs.size**2 * sum(work.costs[other].size for other in work.around[node]) > _DOMINANCE_WORK:
        return
    excess = node_costs[:, None] - node_costs[None, :]
    possible = np.ones(excess.shape, dtype=np.bool_)
    np.fill_diagonal(possible, False)
    for nbytes in work.items[node].values():
        possible &= nbytes[:, None] <= nbytes[None, :]
    with np.errstate(invalid="ignore"):
        for costs in work.around[node].values():
            if not (possible & (excess <= 0)).any() and len(work.around[node]) > _NARROW:
                break
            excess += np.fmax.reduce(costs[:, None, :] - costs[None, :, :], axis=2)
        else:
            possible &= excess <= 0
            _drop_dominated(work, node, possible)


def _drop_dominated(work: Shrinking, node: int, better: Bools) -> None:
    keep = np.ones(len(better), dtype=np.bool_)
    for strategy in range(len(better)):
        if (better[:, strategy] & keep).any():
            keep[strategy] = False
    if not keep.all():
        work.restrict(node, keep)


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
