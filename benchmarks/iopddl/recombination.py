"""The best mixture of two choices of a GraphProblem within its limits.

Where two choices differ, the nodes fall into parts that no edge joins. Each part can move from one choice to the other
on its own: costs and usages of moves add up. Which parts move is a small integer program, with a row for every time
that would overflow (added as they show). A choice that fits stays one that fits; one that does not overflows less.

Reference: partition crossover (Whitley, Hains and Howe, GECCO 2009), with a knapsack over the parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components  # pyright: ignore[reportUnknownVariableType]

from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices
from benchmarks.iopddl.integer_program import Rows, minimise

Bools = NDArray[np.bool_]

# Chosen; what half and double of them do is not recorded.

_MOST_PARTS = 400
"""Parts of one integer program, those that gain or cost most."""

_ROUNDS, _NEW_ROWS = 12, 8
"""Integer programs of one mixture, and rows that each may add: the times that would overflow most."""

_OVERFLOW_WEIGHT = 1e3
"""The cost of an overflow as large as the largest move of a part, as a multiple of the largest gain."""

_SECONDS, _GAP = 0.7, 1e-3
"""Seconds for one mixture, and the relative gap of each program."""


class Landscape:
    """The costs and usages of a problem as flat arrays: prices whole choices at once."""

    def __init__(self, problem: GraphProblem) -> None:
        self.limits = problem.limits
        self.sizes = np.array([node_costs.size for node_costs in problem.costs], dtype=np.intp)
        self.node_start = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.intp)
        self.node_costs = _joined(problem.costs)
        self.source = np.array([e.source for e in problem.edges], dtype=np.intp)
        self.target = np.array([e.target for e in problem.edges], dtype=np.intp)
        self.width = np.array([e.costs.shape[1] for e in problem.edges], dtype=np.intp)
        self.edge_start = _starts([e.costs.size for e in problem.edges])
        self.edge_costs = _joined([e.costs.ravel() for e in problem.edges])
        self.user = np.array([u.node for u in problem.usages], dtype=np.intp)
        self.start = np.array([u.start for u in problem.usages], dtype=np.intp)
        self.end = np.array([u.end for u in problem.usages], dtype=np.intp)
        self.usage_start = _starts([u.nbytes.size for u in problem.usages])
        self.nbytes = _joined([u.nbytes for u in problem.usages])
        lengths = self.sizes[self.user]
        self.owner = np.repeat(np.arange(self.user.size), lengths)
        self.place = np.arange(self.nbytes.size) + np.repeat(self.node_start[self.user] - self.usage_start, lengths)

    def nodes_at(self, choice: Indices) -> Floats:
        """The cost of every node, [nodes]."""
        return self.node_costs[self.node_start[:-1] + choice]

    def edges_at(self, choice: Indices) -> Floats:
        """The cost of every edge, [edges]."""
        return self.edge_costs[self.edge_start + choice[self.source] * self.width + choice[self.target]]

    def nbytes_at(self, choice: Indices) -> Floats:
        """The bytes of every usage, [usages]."""
        return self.nbytes[self.usage_start + choice[self.user]]

    def cost(self, choice: Indices) -> float:
        """The cost of a choice."""
        return float(self.nodes_at(choice).sum() + self.edges_at(choice).sum())

    def profile(self, choice: Indices) -> Floats:
        """The bytes occupied at every time, [times]."""
        nbytes, size = self.nbytes_at(choice), self.limits.size + 1
        change = np.bincount(self.start, nbytes, size) - np.bincount(self.end, nbytes, size)
        return np.cumsum(change, dtype=np.float64)[:-1]

    def overflow(self, choice: Indices) -> float:
        """The largest excess over a limit, in bytes; 0 if the choice fits."""
        return float(np.maximum(self.profile(choice) - self.limits, 0.0).max(initial=0.0))

    def priced(self, prices: Floats) -> list[Floats]:
        """Node costs with `prices` [times] for a byte at every time."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        span = total[self.end] - total[self.start]
        extra = np.bincount(self.place, self.nbytes * span[self.owner], self.node_costs.size)
        return np.split(self.node_costs + extra, self.node_start[1:-1])

    def better(self, choice: Indices, other: Indices) -> bool:
        """Whether `choice` overflows less than `other`, or no more and costs less."""
        first, second = self.cost(choice), self.cost(other)
        return (not np.isfinite(first), self.overflow(choice), first) < (
            not np.isfinite(second),
            self.overflow(other),
            second,
        )


def combine(land: Landscape, choice: Indices, other: Indices) -> Indices:
    """The best mixture of `choice` and `other`: never worse than `choice`."""
    moved = choice != other
    if not moved.any():
        return choice
    if not np.isfinite(land.cost(choice)):
        return other if land.better(other, choice) else choice
    part, count = _parts(land, moved)
    gain = _gains(land, choice, other, moved, part, count)
    change = land.nbytes_at(other) - land.nbytes_at(choice)
    users = np.flatnonzero(moved[land.user] & (change != 0))
    users, change = users, change[users]
    owner = part[land.user[users]]
    grows = np.bincount(owner, change > 0, count) > 0
    shrinks = np.bincount(owner, change < 0, count) > 0
    profile = land.profile(choice)
    fits = bool((profile <= land.limits).all())
    useful = (gain < 0) | shrinks if not fits else (gain < 0) | (shrinks & (gain <= -gain[gain < 0].sum()))
    take = (gain <= 0) & ~grows
    candidates = np.flatnonzero(useful & ~take & np.isfinite(gain))
    if candidates.size > _MOST_PARTS:
        candidates = candidates[np.argsort(-np.abs(gain[candidates]), kind="stable")[:_MOST_PARTS]]
    row = np.full(count, -1, dtype=np.intp)
    row[candidates] = np.arange(candidates.size)
    times = land.limits.size + 1
    shifts = np.zeros((candidates.size + 1, times))  # the last row: all that is taken anyway
    row[take] = candidates.size
    known = row[owner] >= 0
    np.add.at(shifts, (row[owner[known]], land.start[users[known]]), change[known])
    np.add.at(shifts, (row[owner[known]], land.end[users[known]]), -change[known])
    shifts = np.cumsum(shifts, axis=1)[:, :-1]
    if candidates.size:
        room = land.limits - profile - shifts[-1]
        take[candidates] = _pick(gain[candidates], shifts[:-1], room, fits=fits)
    mixed = np.where(moved & take[np.maximum(part, 0)], other, choice)
    return mixed if land.better(mixed, choice) else choice


def _parts(land: Landscape, moved: Bools) -> tuple[Indices, int]:
    """[nodes] the part that each moved node is in (-1: not moved), and how many parts there are."""
    both = moved[land.source] & moved[land.target]
    size = moved.size
    links = coo_array((np.ones(int(both.sum())), (land.source[both], land.target[both])), shape=(size, size))
    labels: Indices = np.asarray(connected_components(links, directed=False)[1], dtype=np.intp)  # pyright: ignore[reportUnknownArgumentType]
    part = np.full(size, -1, dtype=np.intp)
    names, numbers = np.unique(labels[moved], return_inverse=True)
    part[moved] = numbers
    return part, names.size


def _gains(land: Landscape, choice: Indices, other: Indices, moved: Bools, part: Indices, count: int) -> Floats:
    """[parts] what moving each part adds to the cost."""
    with np.errstate(invalid="ignore"):
        nodes = np.nan_to_num(land.nodes_at(other) - land.nodes_at(choice), nan=np.inf)
        mixed_source, mixed_target = np.where(moved, other, choice), np.where(moved, other, choice)
        there = land.edge_start + mixed_source[land.source] * land.width + mixed_target[land.target]
        edges = np.nan_to_num(land.edge_costs[there] - land.edges_at(choice), nan=0.0, posinf=np.inf, neginf=-np.inf)
    gain = np.bincount(part[moved], nodes[moved], count)
    owner = np.where(moved[land.source], part[land.source], part[land.target])
    touched = owner >= 0
    # An edge between two moved nodes lies within one part.
    return np.asarray(gain + np.bincount(owner[touched], edges[touched], count), dtype=np.float64)


def _pick(gain: Floats, shifts: Floats, room: Floats, *, fits: bool) -> Bools:
    """[parts] which to move: least cost within `room` [times], or at least overflow if that cannot be."""
    taken = gain < 0
    rows: list[int] = []
    scale = max(float(np.abs(gain).max()), 1e-300)
    unit = max(float(np.abs(shifts).max()), 1.0)
    # The last column is the overflow, which weighs more than any gain.
    costs = gain / scale if fits else np.append(gain / scale, _OVERFLOW_WEIGHT)
    most = np.ones(gain.size) if fits else np.append(np.ones(gain.size), np.inf)
    until = time.monotonic() + _SECONDS
    for _ in range(_ROUNDS):
        worst = _peaks(shifts[taken].sum(axis=0) - room, set(rows))
        if not worst or time.monotonic() > until:
            break
        rows += worst
        table: Floats = shifts[:, rows].T / unit
        if not fits:
            table = np.append(table, -np.ones((len(rows), 1)), axis=1)
        height, width = len(rows), costs.size
        limits = Rows(
            start=np.arange(height) * width,
            columns=np.tile(np.arange(width), height),
            values=table.ravel(),
            lower=np.full(height, -np.inf),
            upper=room[rows] / unit,
        )
        picked, _ = minimise(costs, most, gain.size, limits, seconds=until - time.monotonic(), gap=_GAP)
        if picked is None:
            return np.zeros(gain.size, dtype=np.bool_)
        taken = picked[: gain.size] > 0.5
    return _fitting(taken, gain, shifts, room) if fits else taken


def _fitting(taken: Bools, gain: Floats, shifts: Floats, room: Floats) -> Bools:
    """`taken` without the parts that gain least for what they add where it overflows."""
    taken = taken.copy()
    excess = shifts[taken].sum(axis=0) - room
    while excess.max(initial=0.0) > 0:
        at = int(excess.argmax())
        grows = np.flatnonzero(taken & (shifts[:, at] > 0))
        if not grows.size:
            return np.zeros(gain.size, dtype=np.bool_)
        worst = grows[int((gain[grows] / shifts[grows, at]).argmax())]
        taken[worst] = False
        excess = excess - shifts[worst]
    return taken


def _peaks(excess: Floats, known: set[int]) -> list[int]:
    """The worst times above 0, one of every run of such times, that are not known yet."""
    above = np.flatnonzero(excess > 0)
    if not above.size:
        return []
    runs = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
    tops = [int(run[np.argmax(excess[run])]) for run in runs]
    tops = [t for t in tops if t not in known]
    return sorted(tops, key=lambda t: -excess[t])[:_NEW_ROWS]


def _joined(parts: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def _starts(sizes: Sequence[int]) -> Indices:
    return np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.intp))])[:-1].astype(np.intp)
