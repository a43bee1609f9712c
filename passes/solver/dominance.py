"""Dominance: a sharding problem without strategies that another strategy of the node replaces at no extra cost.

Reference: Goldstein, Efficient rotamer elimination applied to protein side-chains (Biophysical Journal 66, 1994):
dead-end elimination, here with groups of edges that pay equal reshardings once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from passes.solver.problem import Edge, Floats, Indices, ShardingProblem, Sums

_ROUNDING = 1e-12
"""The share by which equal seconds may differ: sums in another order differ by less in double precision."""


class Replacements:
    """The most that it costs to read or make a value in one placement in the place of another; known for all problems
    with one memory, so that equal layers ask once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Edge, Floats]] = {}
        self._kept: dict[tuple[object, ...], NDArray[np.bool_]] = {}

    def extra(self, edge: Edge, allowed: NDArray[np.bool_], readers: int, *, reads: bool) -> Floats:
        """The most that strategy t pays on an edge beyond strategy s, [s, t], for the source or the node that reads.

        `allowed` are the strategies at the other end. In a group of several readers, what s paid for may be wanted by
        another: nothing is saved, and all that t wants may be new. How many there are matters to sums alone.
        """
        arrays = (edge.before, edge.after, edge.seconds, edge.labels, edge.sums)
        key = (*map(id, arrays), edge.weight, allowed.tobytes(), readers, reads)
        if key not in self._known:
            worst, near = self._extra(edge, allowed, readers, reads=reads), edge.after if reads else edge.before
            self._known[key] = (edge, worst[near[:, None], near[None, :]])
        return self._known[key][1]

    def undominated(self, seconds: Floats, extras: Sequence[Floats]) -> NDArray[np.bool_]:
        """Whether each strategy of a node stays, given its extra costs on edges; equal layers have equal `extras`."""
        key = (seconds.tobytes(), *sorted(map(id, extras)))
        if key not in self._kept:
            self._kept[key] = _undominated(seconds, extras)
        return self._kept[key]

    def _extra(self, edge: Edge, allowed: NDArray[np.bool_], readers: int, *, reads: bool) -> Floats:
        """The same by placements, as an edge has them."""
        far = np.unique((edge.before if reads else edge.after)[allowed])
        matrix = edge.weight * (edge.seconds.T if reads else edge.seconds)[:, far]
        if readers > 1 and reads:
            most = matrix.max(axis=1, initial=0.0)
            worst = np.tile(most, (len(matrix), 1))
            if edge.sums is not None and edge.sums.rows[far].any():
                worst = _most_to_read(edge, edge.sums, most, readers)
            labels = np.array([edge.labels.index(label) for label in edge.labels])
            worst[labels[:, None] == labels[None, :]] = 0.0
            return worst
        with np.errstate(invalid="ignore"):
            extra = matrix[None, :, :] - matrix[:, None, :]
            if readers > 1 and edge.sums is not None:
                extra = _most_to_make(edge, edge.sums, far, extra)
        extra[np.isnan(extra)] = 0.0  # impossible either way
        worst = extra.max(axis=2, initial=-np.inf)
        return worst if readers == 1 else np.maximum(worst, 0.0)


def _most_to_make(edge: Edge, sums: Sums, columns: Indices, extra: Floats) -> Floats:
    """The most that a value made in t costs a reader of `columns` beyond one made in s, [s, t, columns], of a group.

    From a sum, it is brought from the source or from where another reader had it reduced to; of two sums, from the same
    place, unless it is one of them that the reader wants. `extra` is what bringing it from the source costs beyond.
    """
    names = sums.names[columns]
    onward = edge.weight * sums.onward[sums.ends][:, names]
    elsewhere = np.where(onward > 0, onward, np.inf).min(axis=0, initial=np.inf)
    direct = edge.weight * edge.seconds[:, columns]
    is_moved = sums.rows[:, None] & (direct > 0)
    least = np.where(is_moved, np.minimum(direct, elsewhere), direct)
    most = np.where(is_moved, np.maximum(direct, onward.max(axis=0, initial=0.0)), direct)
    apart = most[None] - least[:, None]
    both = is_moved[:, None] & sums.rows[None, :, None]
    extra = np.where(both, extra, apart)
    same = np.arange(len(direct))
    extra[same, same] = 0.0
    return extra


def _most_to_read(edge: Edge, sums: Sums, direct: Floats, readers: int) -> Floats:
    """The most that a group of so many readers pays if one reads t in place of s, [s, t], `direct` from the source.

    Where it is the first, a sum is reduced to t, and the others are brought from there; where t is a sum and s was
    none, to what another wants, which may cost anything.
    """
    onward = edge.weight * sums.onward
    to_here = onward[sums.ends].max(axis=0, initial=0.0)[sums.names]
    from_here = np.where(sums.ends, onward.max(axis=1, initial=0.0), 0.0)[sums.names]
    ends = sums.ends[sums.names]
    worst = np.tile(np.maximum(direct, to_here) + (readers - 1) * from_here, (len(direct), 1))
    worst[ends[:, None] & ~ends[None, :]] = np.inf
    return worst


def without_dominated(problem: ShardingProblem) -> ShardingProblem:
    """The problem without strategies that another replaces at no extra cost, whatever the neighbours choose.

    Strategy s goes if some t costs no more with all that its edges pay at most beyond those of s. One of a tie stays,
    so the optimum does not change. A problem with budgets keeps all: fewer bytes may be worth more seconds.
    """
    if problem.budgets:
        return problem
    replacements = problem.cache.kept(Replacements)
    around: list[list[tuple[Edge, int, bool]]] = [[] for _ in problem.seconds]
    for edges in problem.groups.values():
        readers = len(edges) if edges[0].sums is not None else min(len(edges), 2)
        for edge in edges:
            around[edge.source].append((edge, readers, False))
            around[edge.target].append((edge, readers, True))
    allowed = [np.isfinite(strategy_seconds) for strategy_seconds in problem.seconds]
    seconds = list(problem.seconds)
    for node, seconds_of_node in enumerate(problem.seconds):
        extras = [
            replacements.extra(edge, allowed[edge.source if reads else edge.target], readers, reads=reads)
            for edge, readers, reads in around[node]
        ]
        allowed[node] = replacements.undominated(seconds_of_node, extras)
        seconds[node] = np.where(allowed[node], seconds_of_node, np.inf)
    return replace(problem, seconds=tuple(seconds))


def _undominated(seconds: Floats, extras: Sequence[Floats]) -> NDArray[np.bool_]:
    """Whether each strategy stays; the most expensive are tried first, and what replaces them is still there."""
    with np.errstate(invalid="ignore"):
        extra = seconds[None, :] - seconds[:, None] + sum(extras)
    extra[np.isnan(extra)] = np.inf  # both are impossible somewhere: neither replaces the other
    stays: NDArray[np.bool_] = np.isfinite(seconds)
    order: Indices = np.argsort(-np.where(stays, seconds, np.inf), kind="stable")
    for s in order[np.isfinite(seconds[order])].tolist():
        better = stays & (extra[s] <= _ROUNDING * np.abs(seconds))
        better[s] = False
        stays[s] = not better.any()
    return stays
