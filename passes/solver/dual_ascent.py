"""What every placement of every edge is worth: prices near the optimum of a relaxation's dual, by message passing.

A relaxation stated at costs less their prices starts where the prices are, and needs a few steps in place of many.
Nodes are visited in order and back; each gives every edge onward an equal share of what its strategies cost by now, and
the edge hands on the least of that at each of its placements. After the last pass, price differences along an edge are
at most what the resharding costs.

Reference: Kolmogorov, Convergent tree-reweighted message passing for energy minimization (PAMI 2006), figure 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_FORBIDDEN = 1e3
"""Seconds that stand for a resharding that there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """An edge from `source` to `target`: strategies make placement `made` [strategies] and read placement `read`.

    Those are the rows and columns of `seconds`; each has a strategy.
    """

    source: int
    target: int
    made: Indices
    read: Indices
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Onward:
    """A way as one of its ends sees it: `own` and `other` are placements by strategy, `there` and `back` messages.

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
    """Messages about the ways' placements, to the later end (even) and the earlier (odd)."""

    def __init__(self, costs: Sequence[Floats], ways: Sequence[Way]) -> None:
        self.costs, self.ways = costs, ways
        self.ahead: list[list[_Onward]] = [[] for _ in costs]
        self.behind: list[list[_Onward]] = [[] for _ in costs]
        self.sent: list[Floats] = []
        self._sorted: dict[int, tuple[Indices, Indices, Indices]] = {}
        for number, way in enumerate(ways):
            low, high, own, other = way.source, way.target, way.made, way.read
            seconds = np.where(np.isfinite(way.seconds), way.seconds, _FORBIDDEN)
            if low > high:
                low, high, own, other, seconds = high, low, other, own, seconds.T
            up, down = 2 * number, 2 * number + 1
            self.sent += [np.zeros(seconds.shape[1]), np.zeros(seconds.shape[0])]
            if low == high:
                continue
            self.ahead[low].append(self._onward(own, other, seconds.T, node=high, there=up, back=down))
            self.behind[high].append(self._onward(other, own, seconds, node=low, there=down, back=up))
        self.shares = [1.0 / max(len(a), len(b), 1) for a, b in zip(self.ahead, self.behind, strict=True)]

    def _onward(self, own: Indices, other: Indices, seconds: Floats, *, node: int, there: int, back: int) -> _Onward:
        """A way seen from the end where strategies have placements `own`; equal ends of ways share that array."""
        if id(own) not in self._sorted:
            sizes = np.bincount(own)
            self._sorted[id(own)] = own, np.argsort(own, kind="stable"), np.cumsum(sizes) - sizes
        _, order, first = self._sorted[id(own)]
        seconds = np.ascontiguousarray(seconds)
        return _Onward(node=node, order=order, first=first, other=other, seconds=seconds, there=there, back=back)

    def run(self, passes: int) -> None:
        """So many passes over the nodes, forward and back."""
        for turn in reversed(range(passes)):
            self._pass(backward=bool(turn % 2))

    def _pass(self, *, backward: bool) -> None:
        sent, around = self.sent, self.behind if backward else self.ahead
        beliefs = self.beliefs()
        order = range(len(beliefs) - 1, -1, -1) if backward else range(len(beliefs))
        for node in order:
            share = beliefs[node] * self.shares[node]
            for onward in around[node]:
                least = np.minimum.reduceat(share[onward.order], onward.first)
                message = np.minimum.reduce(onward.seconds + (least - sent[onward.back]), axis=1)
                message -= np.minimum.reduce(message)
                beliefs[onward.node] += (message - sent[onward.there])[onward.other]
                sent[onward.there] = message

    def beliefs(self) -> list[Floats]:
        """What the strategies of every node cost, with all messages."""
        beliefs = [own.copy() for own in self.costs]
        for direction in (self.ahead, self.behind):
            for edges in direction:
                for onward in edges:
                    beliefs[onward.node] += self.sent[onward.there][onward.other]
        return beliefs

    def prices(self) -> list[tuple[Floats, Floats]]:
        """Prices of the rows and of the columns of every way."""
        found: list[tuple[Floats, Floats]] = []
        for number, way in enumerate(self.ways):
            seconds = np.where(np.isfinite(way.seconds), way.seconds, _FORBIDDEN)
            message = self.sent[2 * number]
            if way.source <= way.target:
                found.append(((seconds - message).min(axis=1), -message))
            else:
                found.append((message, (message[:, None] - seconds).max(axis=0)))
        return found
