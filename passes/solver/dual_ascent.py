"""Dual ascent by message passing: prices of every edge's placements near the optimum of the relaxation's dual.

A relaxation stated at costs less their prices starts where the prices are, and needs a few steps in place of many.
Nodes are visited in order and back; each gives every edge onward an equal share of what its strategies cost by now, and
the edge hands on the least of that at each of its placements. After the last pass, price differences along an edge are
at most what the resharding costs.

Reference: Kolmogorov, Convergent tree-reweighted message passing for energy minimization (IEEE Trans. PAMI 28, 2006):
TRW-S on monotonic chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.solver.problem import Floats, Indices

_FORBIDDEN = 1e3
"""Seconds that stand for a resharding that there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedEdge:
    """An edge from `source` to `target` by strategies: the placement that each writes (`made`) and reads (`read`).

    Those are the rows and columns of `seconds`; each has a strategy.
    """

    source: int
    target: int
    made: Indices
    read: Indices
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Onward:
    """An edge as seen from one of its ends: `other` are the placements at the other one, `there` and `back` messages.

    `order` sorts the strategies of this end by placement, each of which has one; those of a placement begin at `first`.
    """

    node: int
    order: Indices
    first: Indices
    other: Indices
    seconds: Floats
    there: int
    back: int


class Messages:
    """The messages about the edges' placements, to the later end (even) and the earlier (odd)."""

    def __init__(self, costs: Sequence[Floats], edges: Sequence[PricedEdge]) -> None:
        self.costs, self.edges = costs, edges
        self.ahead: list[list[_Onward]] = [[] for _ in costs]
        self.behind: list[list[_Onward]] = [[] for _ in costs]
        self.sent: list[Floats] = []
        self._sorted: dict[int, tuple[Indices, Indices, Indices]] = {}
        self._turned: dict[int, tuple[Floats, Floats]] = {}
        for number, edge in enumerate(edges):
            low, high, made, read = edge.source, edge.target, edge.made, edge.read
            seconds, turned = self._both(edge)
            if low > high:
                low, high, made, read, seconds, turned = high, low, read, made, turned, seconds
            up, down = 2 * number, 2 * number + 1
            self.sent += [np.zeros(seconds.shape[1]), np.zeros(seconds.shape[0])]
            if low == high:
                continue
            self.ahead[low].append(self._onward(made, read, turned, node=high, there=up, back=down))
            self.behind[high].append(self._onward(read, made, seconds, node=low, there=down, back=up))
        self.shares = [1.0 / max(len(a), len(b), 1) for a, b in zip(self.ahead, self.behind, strict=True)]

    def _both(self, edge: PricedEdge) -> tuple[Floats, Floats]:
        """The seconds of an edge, finite, and their transpose; edges may share that array."""
        if id(edge.seconds) not in self._turned:
            seconds = np.where(np.isfinite(edge.seconds), edge.seconds, _FORBIDDEN)
            self._turned[id(edge.seconds)] = seconds, np.ascontiguousarray(seconds.T)
        return self._turned[id(edge.seconds)]

    def _onward(
        self, placements: Indices, other: Indices, seconds: Floats, *, node: int, there: int, back: int
    ) -> _Onward:
        """An edge as seen from the end whose strategies have these `placements`; equal ends share that array."""
        if id(placements) not in self._sorted:
            sizes = np.bincount(placements)
            self._sorted[id(placements)] = placements, np.argsort(placements, kind="stable"), np.cumsum(sizes) - sizes
        _, order, first = self._sorted[id(placements)]
        return _Onward(node=node, order=order, first=first, other=other, seconds=seconds, there=there, back=back)

    def run(self, passes: int) -> None:
        """Makes `passes` passes over the nodes, forward and back."""
        beliefs = self._beliefs()
        for turn in reversed(range(passes)):
            self._pass(beliefs, backward=bool(turn % 2))

    def _pass(self, beliefs: list[Floats], *, backward: bool) -> None:
        """Passes messages on in one direction and adds what each says anew to the beliefs."""
        sent, around = self.sent, self.behind if backward else self.ahead
        order = range(len(beliefs) - 1, -1, -1) if backward else range(len(beliefs))
        for node in order:
            node_share, sorted_by, class_minima = beliefs[node] * self.shares[node], None, beliefs[node]
            for onward in around[node]:
                if onward.order is not sorted_by:
                    sorted_by, class_minima = onward.order, np.minimum.reduceat(node_share[onward.order], onward.first)
                message = np.minimum.reduce(onward.seconds + (class_minima - sent[onward.back]), axis=1)
                message -= np.minimum.reduce(message)
                beliefs[onward.node] += (message - sent[onward.there])[onward.other]
                sent[onward.there] = message

    def _beliefs(self) -> list[Floats]:
        """The costs of every node's strategies, with all messages."""
        beliefs = [costs.copy() for costs in self.costs]
        for direction in (self.ahead, self.behind):
            for edges in direction:
                for onward in edges:
                    beliefs[onward.node] += self.sent[onward.there][onward.other]
        return beliefs

    def prices(self) -> list[tuple[Floats, Floats]]:
        """The prices of the rows and of the columns of every edge."""
        prices: list[tuple[Floats, Floats]] = []
        for number, edge in enumerate(self.edges):
            seconds, _ = self._both(edge)
            message = self.sent[2 * number]
            if edge.source <= edge.target:
                prices.append(((seconds - message).min(axis=1), -message))
            else:
                prices.append((message, (message[:, None] - seconds).max(axis=0)))
        return prices
