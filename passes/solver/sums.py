"""The reshardings of a sum that several readers want: it is reduced once, for the first of them (`problem.Sums`).

The cost of such a group is no sum of the costs of what its readers ask for. `Reduced` walks its edges, for many answers
at once; `spare` is what the group costs at least beyond what prices charge its readers, which makes a bound of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.solver.problem import Edge, Floats, Indices, Sums

_NEVER = 1e12
"""Seconds of what cannot be: beyond all prices, and finite, so that differences are."""


class Reduced:
    """The placement that a sum was reduced to under each of many answers, as its edges are looked at in order."""

    def __init__(self) -> None:
        self.at: Indices | int = -1

    def seconds(self, sums: Sums | None, before: Indices | int, after: Indices | int, edge_seconds: Floats) -> Floats:
        """The seconds of an edge from placements `before` to `after`: its own, but where the sum was reduced before.

        All of these broadcast together.
        """
        if sums is None:
            return edge_seconds
        names, counts = sums.names[after], sums.rows[before] & (edge_seconds > 0)
        first = np.asarray(self.at) < 0
        seconds = np.where(counts & ~first, sums.onward[self.at, names], edge_seconds)
        self.at = np.where(counts & first & sums.ends[names], names, self.at)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """The seconds that a group costs beyond what its readers are charged: at least `seconds` [rows], less than 0 if
    they are charged too much, and at least `by_reader` [rows, placements] of each where that reader wants one of these.
    """

    seconds: Floats
    by_reader: tuple[Floats, ...]


def spare(edges: Sequence[Edge], charged: Sequence[Floats], rows: Indices, copies: Mapping[object, float]) -> Spare:
    """The cost of some `rows` of a group, all sums, beyond what each edge is `charged` [rows, its placements].

    A sum is reduced to some placement h, and whatever else is wanted is brought from there; or to none, where all want
    sums. Given h, the seconds of bringing it to j, and of a copy there, are shared out to its readers, by what each is
    charged for j beyond what it can be charged at most for anything, j paid by it alone. Shares of j add up to its
    seconds at most, and then each reader chooses by itself: no answer leaves less than the least over h of the price of
    h and of what each reader leaves at least.
    """
    direct, onward, ends, places = _seconds(edges, rows)
    count = direct.shape[1]
    everywhere = np.where(ends & np.isfinite(direct), direct, _NEVER)
    price = np.hstack([np.zeros((len(direct), 1)), everywhere])  # [rows, h], the first: nowhere
    brought = np.where(ends, onward[None], np.minimum(direct[:, None, :], onward[None]))  # [rows, h, j]
    brought = np.concatenate([np.where(ends, _NEVER, direct)[:, None, :], brought], axis=1)
    if copies:
        kept = np.zeros(count)
        for edge, at in zip(edges, places, strict=True):
            kept[at] = [copies.get(label, 0.0) for label in edge.labels]
        brought += kept
    brought = np.where(direct[:, None, :] > 0, np.minimum(brought, _NEVER), 0.0)
    charges_at = np.full((len(charged), len(direct), 1, count), -_NEVER)
    for reader, (charges, at) in enumerate(zip(charged, places, strict=True)):
        charges_at[reader, :, 0, at] = charges.T
    alone = (charges_at - brought).max(axis=3, keepdims=True)
    beyond = np.maximum(0.0, charges_at - alone)
    together = beyond.sum(axis=0)
    scale = np.divide(brought, together, out=np.ones_like(together), where=together > brought)
    shares = beyond * scale
    worth = (charges_at - shares).max(axis=3)  # [readers, rows, h]
    remainder = price - worth.sum(axis=0)  # [rows, h]
    by_reader = tuple(
        np.min(remainder[:, :, None] + worth[r][:, :, None] + shares[r] - charges_at[r], axis=1)[:, at]
        for r, at in enumerate(places)
    )
    return Spare(seconds=remainder.min(axis=1), by_reader=by_reader)


def _seconds(edges: Sequence[Edge], rows: Indices) -> tuple[Floats, Floats, NDArray[np.bool_], list[Indices]]:
    """The seconds from `rows` to all placements that a group's readers want and between those, which of them end a sum,
    and each edge's own among them.
    """
    places, sums = list[Indices](), edges[0].sums
    assert sums is not None
    direct = np.full((rows.size, sums.ends.size), np.inf)
    for edge in edges:
        assert edge.sums is not None
        places.append(edge.sums.names)
        direct[:, edge.sums.names] = edge.weight * edge.seconds[rows]
    return direct, edges[0].weight * sums.onward, sums.ends, places
