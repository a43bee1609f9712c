"""The least of a sum of factors, or an answer and a bound that enclose it, by eliminating one node after another.

    order       nodes whose elimination makes small tables go first                      (`order`)
    eliminate   a node's factors are added up, and the least over the node is a factor
                of its neighbours; a table that would be too large is made of several,
                each of which takes its own least: what is left at the end is a bound    (`MiniBuckets`)
    choose      nodes are chosen again in reverse, by what the tables say; where some were
                made of several, many partial answers are kept, and two that differ in
                nothing that is still to come are one                                    (`Beam`)

Without a table that is too large the answer is the optimum. Work is counted in entries of tables, never in seconds:
the answer is the same on a busy machine.

Reference: Dechter, Bucket elimination (Artificial Intelligence 113, 1999); Dechter and Rish, Mini-buckets (J. ACM 50,
2003); the matching of minima is that of Ihler, Flerova, Dechter and Otten (UAI 2012), the search that of Kask and
Dechter, A general scheme for automatic generation of search heuristics (Artificial Intelligence 129, 2001).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from passes.solver.factors import Factor, Floats, Group, Indices, classes, groups, scope, total
from passes.solver.lower_bound import Bound
from passes.solver.problem import ShardingProblem

EXACT_ENTRIES = 2e7
"""Entries of all tables together up to which a problem is solved exactly: a second of one processor, 160 MB at most."""

_LIMITS = (1e5, 1e6, 4e6)
_KEPT = (6e4, 1.5e5, 5e5)
"""Entries of one table, and partial answers kept over all nodes, in each round of a search that cannot be exact."""

_ENTRIES = 6e8
"""Entries of all tables in a round after the first: 2 s of one processor."""

_AFFORDABLE_ENTRIES, _AFFORDABLE_TABLE = 4e8, 2e7
"""Entries of all tables, and of one, up to which a bound of small tables that leaves a gap is followed by an exact
solution: five seconds of one processor, where partial answers took longer and left a gap."""

_CLOSE = 5e-3
"""The gap at which no further round is worth its work; each round looks for answers that are better by any gap."""

_BEYOND = 4.0
"""What is impossible costs this many times what all else can cost together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best `choice`, None if none was found that is better than known, and a `bound` in seconds of all choices."""

    choice: tuple[int, ...] | None
    bound: float


class Factors:
    """A sharding problem as a sum of factors.

    With a `bound` the same seconds are told in another way: what the bound counts of edges is moved to the nodes.
    """

    def __init__(self, problem: ShardingProblem, bound: Bound | None = None) -> None:
        self.problem = problem
        self.allowed: list[Indices] = [np.flatnonzero(np.isfinite(own)) for own in problem.seconds]
        reduced = problem.seconds if bound is None else bound.reduced
        own = [seconds[allowed] for seconds, allowed in zip(reduced, self.allowed, strict=True)]
        finite = (edge.weight * edge.seconds[np.isfinite(edge.seconds)].max(initial=0.0) for edge in problem.edges)
        self.beyond = _BEYOND * (sum(float(np.abs(seconds).max()) for seconds in own) + sum(finite))
        self.groups: list[Group] = groups(problem, self.allowed, self.beyond, {} if bound is None else bound.prices)
        self.factors: list[Factor] = [Factor.of_node(node, seconds) for node, seconds in enumerate(own)]
        self.factors += [factor for group in self.groups for factor in group.factors]

    @cached_property
    def order(self) -> Order:
        """In which order to eliminate the nodes."""
        return order(self.factors, len(self.allowed))

    @property
    def is_affordable(self) -> bool:
        """Whether the optimum is worth the work of exact tables, where small ones leave a gap."""
        small = max(self.order.tables, default=0.0) <= _AFFORDABLE_TABLE
        return small and self.order.entries() <= _AFFORDABLE_ENTRIES and self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether the factors of every group add up to what it pays, where many readers make that too large a table."""
        return all(group.is_exact for group in self.groups)

    def strategies(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """The strategies of a problem that these places among the allowed ones stand for."""
        return tuple(int(allowed[place]) for allowed, place in zip(self.allowed, chosen, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Nodes as they are eliminated, and the entries of the table that each of them makes."""

    nodes: tuple[int, ...]
    tables: tuple[float, ...]

    def entries(self, limit: float = math.inf) -> float:
        """The entries of all tables if none has more than `limit`."""
        return sum(min(size, limit) for size in self.tables)


def order(factors: Sequence[Factor], n_nodes: int) -> Order:
    """The greedy order: the node whose neighbours and own classes make the smallest table is next."""
    scopes: dict[int, dict[int, Indices]] = {
        number: dict(zip(factor.nodes, factor.classes, strict=True)) for number, factor in enumerate(factors)
    }
    around: list[set[int]] = [set() for _ in range(n_nodes)]
    for number, own in scopes.items():
        for node in own:
            around[node].add(number)

    def joined(node: int) -> dict[int, Indices]:
        wanted: dict[int, list[Indices]] = {}
        for number in sorted(around[node]):
            for other, own in scopes[number].items():
                wanted.setdefault(other, []).append(own)
        return {other: classes(own) for other, own in wanted.items()}

    def entries(own: dict[int, Indices]) -> float:
        return math.prod(float(each.max()) + 1 for each in own.values())

    tables = {node: joined(node) for node in range(n_nodes)}
    sizes = {node: entries(own) for node, own in tables.items()}
    nodes, made, last = list[int](), list[float](), len(scopes)
    while sizes:
        node = min(sizes, key=lambda node: (sizes[node], node))
        made.append(sizes.pop(node))
        nodes.append(node)
        table = tables.pop(node)
        del table[node]
        for number in around[node]:
            for other in scopes.pop(number):
                around[other] -= {number} if other != node else set()
        scopes[last] = table
        for other in table:
            around[other].add(last)
        for other in table:
            tables[other] = joined(other)
            sizes[other] = entries(tables[other])
        last += 1
    return Order(nodes=tuple(nodes), tables=tuple(made))


@dataclass(slots=True)
class MiniBuckets:
    """Factors eliminated in an order, no table larger than `limit` entries; `bound` is what is left, in seconds.

    `buckets[i]` are the factors of the i-th node that mention none before it, `messages[i]` the least of their sums.
    """

    factors: Sequence[Factor]
    nodes: Sequence[int]
    limit: float
    bound: float = field(default=0.0, init=False)
    is_exact: bool = field(default=True, init=False)
    buckets: list[list[Factor]] = field(init=False)
    messages: list[list[Factor]] = field(init=False)

    def __post_init__(self) -> None:
        place = {node: at for at, node in enumerate(self.nodes)}
        self.buckets = [[] for _ in self.nodes]
        self.messages = [[] for _ in self.nodes]
        for factor in self.factors:
            self.buckets[min(place[node] for node in factor.nodes)].append(factor)
        for at, node in enumerate(self.nodes):
            for part in self._parts(at):
                message = part.without(node)
                self.messages[at].append(message)
                if message.nodes:
                    self.buckets[min(place[other] for other in message.nodes)].append(message)
                else:
                    self.bound += float(message.table)

    def _parts(self, at: int) -> list[Factor]:
        """The sums of a node's factors, as few as the limit allows; their least seconds by strategy made equal."""
        node, parts = self.nodes[at], list[list[Factor]]()
        for factor in sorted(self.buckets[at], key=lambda factor: -factor.table.size):
            for part in parts:
                sizes = [float(own.max()) + 1 for own in scope([*part, factor]).values()]
                if math.prod(sizes) <= self.limit:
                    part.append(factor)
                    break
            else:
                parts.append([factor])
        if len(parts) == 1:
            return [total(parts[0])]
        self.is_exact = False
        sums = [total(part) for part in parts]
        least = [part.least(node) for part in sums]
        mean = np.mean(least, axis=0)
        return [total([part, Factor.of_node(node, mean - own)]) for part, own in zip(sums, least, strict=True)]


class Beam:
    """Choices made node by node in the reverse of an order of elimination, at most `width` of them kept at a time.

    What is kept of a partial answer is `least`, a bound of the answers that it may become, and the places of nodes that
    matter for what is to come. Answers of `upper` seconds or more are dropped.
    """

    def __init__(self, factors: Factors, tables: MiniBuckets, upper: float, width: int) -> None:
        self.factors, self.tables, self.upper, self.width = factors, tables, upper, width
        place = {node: at for at, node in enumerate(tables.nodes)}
        self.inexact: dict[int, list[Group]] = {}
        self.wanted: dict[int, list[tuple[int, Indices]]] = {node: [] for node in tables.nodes}
        for at, bucket in enumerate(tables.buckets):
            for factor in bucket:
                for node, own in zip(factor.nodes, factor.classes, strict=True):
                    self.wanted[node].append((at, own))
        for group in (group for group in factors.groups if not group.is_exact):
            last = min(place[node] for node in group.nodes)
            self.inexact.setdefault(last, []).append(group)
            for node in group.nodes:
                self.wanted[node].append((last, np.arange(factors.allowed[node].size)))
        for own in self.wanted.values():
            own.sort(key=lambda one: one[0])
        self.told: dict[tuple[int, int], Indices] = {}
        self.least: Floats = np.array([tables.bound])
        self.kept: dict[int, Indices] = {}
        self.dropped = np.inf

    def run(self) -> Found:
        """The best answer below `upper` that is left, and a bound of all answers."""
        steps: list[tuple[Indices, Indices]] = []
        for at in reversed(range(len(self.tables.nodes))):
            rows, places = self._extend(at)
            if not rows.size:
                return Found(choice=None, bound=min(self.dropped, self.upper))
            steps.append((rows, places))
        row = int(np.argmin(self.least))
        bound, chosen = min(self.dropped, self.upper, float(self.least[row])), [0] * len(self.tables.nodes)
        for node, (rows, places) in zip(self.tables.nodes, reversed(steps), strict=True):
            chosen[node], row = int(places[row]), int(rows[row])
        return Found(choice=self.factors.strategies(chosen), bound=bound)

    def _extend(self, at: int) -> tuple[Indices, Indices]:
        """Chooses the node at a place of the order: the partial answer that each continues, and the place chosen."""
        node = self.tables.nodes[at]
        places = np.arange(self.factors.allowed[node].size)
        chosen = {other: own[:, None] for other, own in self.kept.items()} | {node: places[None, :]}
        least = np.repeat(self.least[:, None], places.size, axis=1)
        for factor in self.tables.buckets[at]:
            least += factor.at(chosen)
        for message in self.tables.messages[at]:
            least -= message.at(chosen)
        for group in self.inexact.get(at, ()):
            least += group.at(chosen) - sum(factor.at(chosen) for factor in group.factors)
        rows, columns = np.nonzero(least < self.upper)
        found = least[rows, columns]
        after = {other: own[rows] for other, own in self.kept.items()} | {node: columns}
        context = {other: own[after[other]] for other in after if (own := self._told(other, at)) is not None}
        best = self._best(found, list(context.values()))
        self.least, self.kept = found[best], {other: after[other][best] for other in context}
        return rows[best], columns[best]

    def _told(self, node: int, at: int) -> Indices | None:
        """The classes of a node that what comes before a place of the order tells apart; None if nothing reads it."""
        wanted = self.wanted[node]
        count = bisect_left(wanted, at, key=lambda one: one[0])
        if count == 0:
            return None
        known = count
        while known > 1 and (node, known) not in self.told:
            known -= 1
        told = self.told.setdefault((node, known), wanted[0][1])
        for number in range(known, count):
            told = classes([told, wanted[number][1]])
            self.told[node, number + 1] = told
        return told

    def _best(self, least: Floats, context: Sequence[Indices]) -> Indices:
        """The partial answers to keep: of those with one context the cheapest, and of these as many as are allowed."""
        if not least.size:
            return np.zeros(0, dtype=np.intp)
        key = np.zeros(least.size, dtype=np.intp)
        for own in context:
            if int(key.max()) > 2**40:
                key = np.unique(key, return_inverse=True)[1].astype(np.intp)
            key = key * (int(own.max()) + 1) + own
        in_order = np.lexsort((least, key))
        first = np.ones(least.size, dtype=np.bool_)
        first[1:] = key[in_order[1:]] != key[in_order[:-1]]
        best = in_order[first]
        if best.size > self.width:
            best = best[np.argsort(least[best], kind="stable")]
            self.dropped = min(self.dropped, float(least[best[self.width]]))
            best = best[: self.width]
        return best


def eliminate(factors: Factors, upper: float = math.inf) -> Found:
    """The optimum, proven, of a problem whose order makes at most `EXACT_ENTRIES`; None if it is not below `upper`."""
    tables = MiniBuckets(factors.factors, factors.order.nodes, math.inf)
    found = Beam(factors, tables, min(upper, factors.beyond), width=1).run()
    return Found(choice=found.choice, bound=min(tables.bound, upper))


def enclose(factors: Factors, upper: float, gap: float) -> Found:
    """An answer below `upper` seconds, if one is found, and a bound; ends once they are `_CLOSE`, or nothing is gained.

    Where the bound of small tables leaves a gap that exact ones can afford to close, the answer is the optimum.
    """
    best: tuple[int, ...] | None = None
    bound = known = -math.inf
    for limit, kept in zip(_LIMITS, _KEPT, strict=True):
        if math.isfinite(bound) and factors.order.entries(limit) > _ENTRIES:
            break
        tables = MiniBuckets(factors.factors, factors.order.nodes, limit)
        width = math.ceil(kept / max(1, sum(own.size > 1 for own in factors.allowed)))
        bound = max(bound, min(tables.bound, upper))
        if _meet(upper, bound, gap):
            break
        if factors.is_affordable:
            del tables
            return eliminate(factors, upper)
        before = upper
        found = Beam(factors, tables, min(upper * (1 - gap), factors.beyond), width).run()
        if found.choice is not None and (seconds := factors.problem.evaluate(found.choice)) < upper:
            best, upper = found.choice, seconds
        bound = max(known, bound, min(found.bound, upper))
        if _meet(upper, bound, max(gap, _CLOSE)) or (upper, bound) == (before, known):
            break
        known = bound
    return Found(choice=best, bound=bound)


def _meet(upper: float, bound: float, gap: float) -> bool:
    return math.isfinite(upper) and upper - bound <= gap * abs(upper)
