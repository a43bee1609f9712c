"""Sharding problems as numbers: a strategy for every node, edges between nodes, and bytes that must fit.

A problem is plain numbers; `evaluate` and `usage` say what an answer costs, whoever found it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

T = TypeVar("T")

ROUNDING = 1e-9
"""The share by which seconds may differ that were added up in another order: far more than doubles lose in the longest
sums, far less than any gap that is asked for."""

_EXCESS = 1e-6
"""The share by which an answer may exceed a budget: solvers keep rows to about this, and a device's memory is not known
so well."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sums:
    """The rows of an edge that are sums still to be reduced, and what it takes to go on from where one was reduced to.

    A group reduces a sum once: to the first placement without partial axes, one that `ends` it, that its edges ask for
    in their order. What they ask for after that is brought from there, in `onward` seconds [names before, names after]
    in the place of the edge's own. `rows` [placements before] are the sums, `names` [placements after] number the
    placements of the group, for `ends` and `onward`.
    """

    rows: NDArray[np.bool_]
    names: Indices
    ends: NDArray[np.bool_]
    onward: Floats

    @property
    def key(self) -> tuple[bytes, ...]:
        """Bytes that are equal for equal sums."""
        return tuple(array.tobytes() for array in (self.rows, self.names, self.ends, self.onward))

    def scaled(self, weight: float, beyond: float) -> Sums:
        """The same that occurs so often, what is impossible at `beyond` seconds."""
        return replace(self, onward=weight * np.where(np.isfinite(self.onward), self.onward, beyond))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """A value that `source` makes and `target` reads.

    `before` [strategies of source] and `after` [strategies of target] index the rows and columns of `seconds`
    [placements before, placements after]; `labels` names the columns, so that edges of one `group` can share a
    resharding; `weight` is how often the group occurs. `origins` names the rows: a row and a column of one name are one
    placement, and `seconds` must then obey the triangle inequality through it. Without names, rows stand apart. With
    `sums`, the order of a group's edges is that of its readers in the program.
    """

    source: int
    target: int
    before: Indices
    after: Indices
    seconds: Floats
    labels: tuple[object, ...]
    group: int
    weight: float = 1.0
    origins: tuple[object, ...] = ()
    sums: Sums | None = None

    @property
    def most_seconds(self) -> float:
        """The most that this edge costs, where that is possible."""
        tables = (self.seconds,) if self.sums is None else (self.seconds, self.sums.onward)
        return max(float(table[np.isfinite(table)].max(initial=0.0)) for table in tables)

    def copies(self, choice: Sequence[int]) -> object | None:
        """The placement in which an answer makes a second array of the value; None where it stays as it is."""
        i, j = self.before[choice[self.source]], self.after[choice[self.target]]
        origin = self.origins[i] if self.origins else None
        return None if self.labels[j] == origin else self.labels[j]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Budget:
    """Bytes that are live at one point of the program, at most `limit` of them.

    Node n holds `nbytes[n]` [strategies]; `copies[g][label]` are the bytes of what group g is copied to.
    """

    nbytes: dict[int, Floats]
    copies: dict[int, dict[object, float]]
    limit: float


class Cache:
    """Values that are made once for problems that share their arrays, such as those of one mesh."""

    def __init__(self) -> None:
        self._kept: dict[object, object] = {}

    def kept(self, make: Callable[[], T]) -> T:
        """The result of `make`, computed once."""
        if make not in self._kept:
            self._kept[make] = make()
        return cast("T", self._kept[make])


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardingProblem:
    """Nodes with the seconds of their strategies (infinite: not allowed), the edges between them, and budgets.

    `kinds` says in words what each node is: nodes of different kinds are never merged, even where their costs agree.
    `cache` has what solvers make of arrays that several problems share.
    """

    seconds: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    kinds: tuple[str, ...] = ()
    budgets: tuple[Budget, ...] = field(default=())
    cache: Cache = field(default_factory=Cache, repr=False)

    @cached_property
    def remembered(self) -> Cache:
        """A cache of what is made of this very problem, its seconds and budgets included."""
        return Cache()

    @cached_property
    def groups(self) -> Mapping[int, Sequence[Edge]]:
        """The edges of each group."""
        edges_of: dict[int, list[Edge]] = defaultdict(list)
        for edge in self.edges:
            edges_of[edge.group].append(edge)
        return edges_of

    @cached_property
    def around(self) -> Sequence[Sequence[Sequence[Edge]]]:
        """The groups that each node makes the value of or reads."""
        around: list[list[Sequence[Edge]]] = [[] for _ in self.seconds]
        for edges in self.groups.values():
            for node in {n for edge in edges for n in (edge.source, edge.target)}:
                around[node].append(edges)
        return around

    @cached_property
    def sums(self) -> Sequence[Sequence[Edge]]:
        """The edges of each group of a value that may be a sum."""
        return [edges for edges in self.groups.values() if edges[0].sums is not None]

    @cached_property
    def copied(self) -> Mapping[int, Sequence[Floats]]:
        """The bytes [budgets, placements before, placements after] that each edge of a group copies, where a budget
        counts any; zero where the value stays as it is.
        """
        groups = dict.fromkeys(group for budget in self.budgets for group in budget.copies if group in self.groups)
        return {group: [_copied(edge, self.budgets) for edge in self.groups[group]] for group in groups}

    def evaluate(self, choice: Sequence[int]) -> float:
        """Total seconds when node n takes strategy `choice[n]`; independent of the program that found it."""
        total = sum(float(seconds[c]) for seconds, c in zip(self.seconds, choice, strict=True))
        once: dict[tuple[int, int, object], float] = {}
        for edge in self.edges:
            if edge.sums is None:
                i, j = edge.before[choice[edge.source]], edge.after[choice[edge.target]]
                once[(edge.group, int(i), edge.labels[j])] = edge.weight * float(edge.seconds[i, j])
        return total + sum(once.values()) + sum(seconds for edges in self.sums for seconds in paid(edges, choice))

    def usage(self, budget: Budget, choice: Sequence[int]) -> float:
        """Bytes that an answer takes of a budget."""
        nbytes_used = sum(float(nbytes[choice[node]]) for node, nbytes in budget.nbytes.items())
        for group, copies in budget.copies.items():
            labels = dict.fromkeys(edge.copies(choice) for edge in self.groups.get(group, ()))
            nbytes_used += sum(copies.get(label, 0.0) for label in labels if label is not None)
        return nbytes_used

    def least(self, budget: Budget) -> float:
        """The bytes of a budget that every answer needs."""
        allowed = ((nbytes, np.isfinite(self.seconds[node])) for node, nbytes in budget.nbytes.items())
        return sum(float(nbytes[legal].min()) if legal.any() else 0.0 for nbytes, legal in allowed)

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether an answer keeps every budget, to a part in a million."""
        return all(self.usage(budget, choice) <= budget.limit * (1 + _EXCESS) for budget in self.budgets)


def _copied(edge: Edge, budgets: Sequence[Budget]) -> Floats:
    """The bytes [budgets, placements before, placements after] of the second array that an edge makes."""
    copies = [budget.copies.get(edge.group, {}) for budget in budgets]
    nbytes = np.array([[of_label.get(label, 0.0) for label in edge.labels] for of_label in copies])
    origins = edge.origins or (None,) * len(edge.seconds)
    moves = np.array([[label is not None and label != origin for label in edge.labels] for origin in origins])
    return nbytes[:, None, :] * moves


def paid(edges: Sequence[Edge], choice: Sequence[int]) -> Iterable[float]:
    """The seconds of the reshardings of a group under an answer, equal ones once."""
    seconds_of: dict[tuple[int, object], float] = {}
    reduced = -1  # the number of the placement that the sum was reduced to
    for edge in edges:
        i, j = int(edge.before[choice[edge.source]]), int(edge.after[choice[edge.target]])
        if (i, edge.labels[j]) in seconds_of:
            continue
        seconds, sums = float(edge.seconds[i, j]), edge.sums
        if sums is not None and sums.rows[i] and seconds > 0:
            name = int(sums.names[j])
            if reduced >= 0:
                seconds = float(sums.onward[reduced, name])
            elif sums.ends[name]:
                reduced = name
        seconds_of[i, edge.labels[j]] = edge.weight * seconds
    return seconds_of.values()


def meet(objective: float, bound: float, gap: float) -> bool:
    """Whether there is an objective, and it is at most a share `gap` of it above a bound, but for rounding."""
    return math.isfinite(objective) and objective - bound <= (1 + ROUNDING) * gap * abs(objective)
