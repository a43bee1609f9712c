"""Dominance: a sharding problem without strategies that another strategy of the node replaces at no extra cost.

Reference: Goldstein, Efficient rotamer elimination applied to protein side-chains (Biophysical Journal 66, 1994):
dead-end elimination, here with groups of edges that pay equal reshardings once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from passes.solver.problem import Edge, Floats, Indices, ShardingProblem

_ROUNDING = 1e-12
"""Of the seconds that are compared: sums in another order differ by less in double precision."""


class Replacements:
    """The most that it costs to read or make a value in one placement in the place of another; known for all problems
    with one memory, so that equal layers ask once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Edge, Floats]] = {}
        self._kept: dict[tuple[object, ...], NDArray[np.bool_]] = {}

    def extra(self, edge: Edge, allowed: NDArray[np.bool_], alone: bool, *, reads: bool) -> Floats:
        """The most that strategy t pays on an edge beyond strategy s, [s, t], for the source or the node that reads.

        `allowed` are the strategies at the other end. In a group of several readers, what s paid for may be wanted by
        another: nothing is saved, and all that t wants may be new.
        """
        arrays = (edge.before, edge.after, edge.seconds, edge.labels)
        key = (*map(id, arrays), edge.weight, allowed.tobytes(), alone, reads)
        if key not in self._known:
            self._known[key] = (edge, self._extra(edge, allowed, alone, reads))
        return self._known[key][1]

    def undominated(self, seconds: Floats, extras: Sequence[Floats]) -> NDArray[np.bool_]:
        """Whether each strategy of a node stays, given its extra costs on edges; equal layers have equal `extras`."""
        key = (seconds.tobytes(), *sorted(map(id, extras)))
        if key not in self._kept:
            self._kept[key] = _undominated(seconds, extras)
        return self._kept[key]

    def _extra(self, edge: Edge, allowed: NDArray[np.bool_], alone: bool, reads: bool) -> Floats:
        near_side, far = (edge.after, edge.before) if reads else (edge.before, edge.after)
        matrix = edge.weight * (edge.seconds.T if reads else edge.seconds)[:, np.unique(far[allowed])]
        if alone or not reads:
            with np.errstate(invalid="ignore"):
                extra = matrix[None, :, :] - matrix[:, None, :]
            extra[np.isnan(extra)] = 0.0  # impossible either way
            worst = extra.max(axis=2, initial=-np.inf)
            worst = worst if alone else np.maximum(worst, 0.0)
        else:
            worst = np.tile(matrix.max(axis=1, initial=0.0), (len(matrix), 1))
            labels = np.array([edge.labels.index(label) for label in edge.labels])
            worst[labels[:, None] == labels[None, :]] = 0.0
        return worst[near_side[:, None], near_side[None, :]]


def without_dominated(problem: ShardingProblem) -> ShardingProblem:
    """The problem without strategies that another replaces at no extra cost, whatever the neighbours choose.

    Strategy s goes if some t costs no more with all that its edges pay at most beyond those of s. One of a tie stays,
    so the optimum does not change. A problem with budgets keeps all: fewer bytes may be worth more seconds.
    """
    if problem.budgets:
        return problem
    replacements = problem.memory.kept(Replacements)
    around: list[list[tuple[Edge, bool, bool]]] = [[] for _ in problem.seconds]
    for edges in problem.groups.values():
        for edge in edges:
            around[edge.source].append((edge, len(edges) == 1, False))
            around[edge.target].append((edge, len(edges) == 1, True))
    allowed = [np.isfinite(strategy_seconds) for strategy_seconds in problem.seconds]
    seconds = list(problem.seconds)
    for node, seconds_of_node in enumerate(problem.seconds):
        extras = [
            replacements.extra(edge, allowed[edge.source if reads else edge.target], alone, reads=reads)
            for edge, alone, reads in around[node]
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
