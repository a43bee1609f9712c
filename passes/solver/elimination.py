"""Elimination: the minimum of a sum of factors, or an answer and a bound that enclose it, eliminating one node after
another.

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
from passes.solver.problem import ShardingProblem, meet

EXACT_ENTRIES = 2e7
"""Entries of all tables together up to which a problem is solved exactly: a second of one processor, 160 MB at most."""

_LIMITS = (1e5, 1e6, 4e6)
_KEPT = (6e4, 1.5e5, 5e5)
"""Entries of one table, and partial answers kept over all nodes, in each round of a search that cannot be exact: a
choice between work and the bound. Half as many answers kept left gaps of 5.6 % in place of 5.1 % in three random
problems of 80 nodes, whose answers were 0.2 % dearer; with tables of a hundredth, double closed 6.0 % to 5.6 % and
found no faster step."""

_ENTRIES = 6e8
"""Entries of all tables in a round after the first: 2 s of one processor."""

_AFFORDABLE_ENTRIES, _AFFORDABLE_TABLE = 4e8, 2e7
"""Entries of all tables, and of one, up to which a bound of small tables that leaves a gap is followed by an exact
solution: five seconds of one processor, where partial answers took longer and left a gap."""

_CLOSE = 5e-3
"""The gap at which no further round is worth its work; each round looks for answers that are better by any gap."""

_MOST_KEY = 2**40
"""Keys of contexts beyond which they are numbered anew, so that one more factor does not overflow 64 bits."""

_BEYOND = 4.0
"""The cost of what is impossible, as a multiple of what all else can cost together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enclosure:
    """The best `choice`, None if none beats the known one, and a lower `bound` in seconds of all choices."""

    choice: tuple[int, ...] | None
    bound: float


class Factors:
    """A sharding problem as a sum of factors.

    With a `bound` the same seconds are told in another way: what the bound counts of edges is moved to the nodes.
    """

    def __init__(self, problem: ShardingProblem, bound: Bound | None = None) -> None:
        self.problem = problem
        self.allowed: list[Indices] = [
            np.flatnonzero(np.isfinite(strategy_seconds)) for strategy_seconds in problem.seconds
        ]
        reduced = problem.seconds if bound is None else bound.reduced
        reduced_seconds = [seconds[allowed] for seconds, allowed in zip(reduced, self.allowed, strict=True)]
        finite = (edge.weight * edge.most_seconds for edge in problem.edges)
        self.beyond = _BEYOND * (sum(float(np.abs(seconds).max()) for seconds in reduced_seconds) + sum(finite)) or 1.0
        self.groups: list[Group] = groups(problem, self.allowed, self.beyond, {} if bound is None else bound.prices)
        self.factors: list[Factor] = [Factor.of_node(node, seconds) for node, seconds in enumerate(reduced_seconds)]
        self.factors += [factor for group in self.groups for factor in group.factors]

    @cached_property
    def order(self) -> Order:
        """The order in which to eliminate the nodes."""
        return order(self.factors, len(self.allowed))

    @property
    def is_affordable(self) -> bool:
        """Whether the optimum is worth the work of exact tables, where small ones leave a gap."""
        small = max(self.order.tables, default=0.0) <= _AFFORDABLE_TABLE
        return small and self.order.entries() <= _AFFORDABLE_ENTRIES and self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether the factors of every group add up to its cost, which many readers may make too large a table."""
        return all(group.is_exact for group in self.groups)

    def strategies(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """The strategies of a problem, given by their indices among the allowed ones."""
        return tuple(int(allowed[place]) for allowed, place in zip(self.allowed, chosen, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of elimination, with the entries of the table that each node makes."""

    nodes: tuple[int, ...]
    tables: tuple[float, ...]

    def entries(self, limit: float = math.inf) -> float:
        """The number of entries of all tables, none of which has more than `limit`."""
        return sum(min(size, limit) for size in self.tables)


def order(factors: Sequence[Factor], n_nodes: int) -> Order:
    """The greedy order: the node whose neighbours and own classes make the smallest table is next."""
    scopes: dict[int, dict[int, Indices]] = {
        number: dict(zip(factor.nodes, factor.classes, strict=True)) for number, factor in enumerate(factors)
    }
    around: list[set[int]] = [set() for _ in range(n_nodes)]
    for number, class_arrays in scopes.items():
        for node in class_arrays:
            around[node].add(number)

    def joined(node: int) -> dict[int, Indices]:
        arrays_of: dict[int, list[Indices]] = {}
        for number in sorted(around[node]):
            for neighbour, class_array in scopes[number].items():
                arrays_of.setdefault(neighbour, []).append(class_array)
        return {neighbour: classes(arrays) for neighbour, arrays in arrays_of.items()}

    def entries(scope: dict[int, Indices]) -> float:
        return math.prod(float(class_array.max()) + 1 for class_array in scope.values())

    tables = {node: joined(node) for node in range(n_nodes)}
    sizes = {node: entries(table_scope) for node, table_scope in tables.items()}
    nodes, entries_made, last = list[int](), list[float](), len(scopes)
    while sizes:
        node = min(sizes, key=lambda node: (sizes[node], node))
        entries_made.append(sizes.pop(node))
        nodes.append(node)
        table = tables.pop(node)
        del table[node]
        for number in around[node]:
            for affected in scopes.pop(number):
                around[affected] -= {number} if affected != node else set()
        scopes[last] = table
        for affected in table:
            around[affected].add(last)
        for affected in table:
            tables[affected] = joined(affected)
            sizes[affected] = entries(tables[affected])
        last += 1
    return Order(nodes=tuple(nodes), tables=tuple(entries_made))


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
                    self.buckets[min(place[neighbour] for neighbour in message.nodes)].append(message)
                else:
                    self.bound += float(message.table)

    def _parts(self, at: int) -> list[Factor]:
        """The sums of a node's factors, as few as the limit allows, with equal least seconds by strategy."""
        node, parts = self.nodes[at], list[list[Factor]]()
        for factor in sorted(self.buckets[at], key=lambda factor: -factor.table.size):
            for part in parts:
                sizes = [float(class_array.max()) + 1 for class_array in scope([*part, factor]).values()]
                if math.prod(sizes) <= self.limit:
                    part.append(factor)
                    break
            else:
                parts.append([factor])
        if len(parts) == 1:
            return [total(parts[0], node)]
        self.is_exact = False
        sums = [total(part, node) for part in parts]
        least_seconds = [part.least(node) for part in sums]
        mean = np.mean(least_seconds, axis=0)
        return [
            total([part, Factor.of_node(node, mean - part_least)], node)
            for part, part_least in zip(sums, least_seconds, strict=True)
        ]


class Beam:
    """A beam search: choices made node by node in the reverse order of elimination, at most `width` kept at a time.

    What is kept of a partial answer is `least`, a bound of the answers that it may become, and the places of nodes that
    matter for what is to come. Answers of `upper` seconds or more are dropped.
    """

    def __init__(self, factors: Factors, tables: MiniBuckets, upper: float, width: int) -> None:
        self.factors, self.tables, self.upper, self.width = factors, tables, upper, width
        place = {node: at for at, node in enumerate(tables.nodes)}
        self.inexact: dict[int, list[Group]] = {}
        self.reads: dict[int, list[tuple[int, Indices]]] = {node: [] for node in tables.nodes}
        for at, bucket in enumerate(tables.buckets):
            for factor in bucket:
                for node, class_array in zip(factor.nodes, factor.classes, strict=True):
                    self.reads[node].append((at, class_array))
        for group in (group for group in factors.groups if not group.is_exact):
            last = min(place[node] for node in group.nodes)
            self.inexact.setdefault(last, []).append(group)
            for node in group.nodes:
                self.reads[node].append((last, np.arange(factors.allowed[node].size)))
        for class_array in self.reads.values():
            class_array.sort(key=lambda read: read[0])
        self.distinguished_classes: dict[tuple[int, int], Indices] = {}
        self.least: Floats = np.array([tables.bound])
        self.kept: dict[int, Indices] = {}
        self.dropped = np.inf

    def run(self) -> Enclosure:
        """The best answer below `upper` that is left, with a lower bound of all answers."""
        steps: list[tuple[Indices, Indices]] = []
        for at in reversed(range(len(self.tables.nodes))):
            rows, places = self._extend(at)
            if not rows.size:
                return Enclosure(choice=None, bound=min(self.dropped, self.upper))
            steps.append((rows, places))
        row = int(np.argmin(self.least))
        bound, chosen = min(self.dropped, self.upper, float(self.least[row])), [0] * len(self.tables.nodes)
        for node, (rows, places) in zip(self.tables.nodes, reversed(steps), strict=True):
            chosen[node], row = int(places[row]), int(rows[row])
        return Enclosure(choice=self.factors.strategies(chosen), bound=bound)

    def _extend(self, at: int) -> tuple[Indices, Indices]:
        """The partial answer that each new one extends, and the place chosen for the node at a place of the order."""
        node = self.tables.nodes[at]
        places = np.arange(self.factors.allowed[node].size)
        chosen = {other: kept_places[:, None] for other, kept_places in self.kept.items()} | {node: places[None, :]}
        seconds = np.repeat(self.least[:, None], places.size, axis=1)
        for factor in self.tables.buckets[at]:
            seconds += factor.at(chosen)
        for message in self.tables.messages[at]:
            seconds -= message.at(chosen)
        for group in self.inexact.get(at, ()):
            seconds += group.at(chosen) - sum(factor.at(chosen) for factor in group.factors)
        rows, columns = np.nonzero(seconds < self.upper)
        new_seconds = seconds[rows, columns]
        extended = {other: kept_places[rows] for other, kept_places in self.kept.items()} | {node: columns}
        context = {
            other: distinguished[extended[other]]
            for other in extended
            if (distinguished := self._distinguished(other, at)) is not None
        }
        best = self._best(new_seconds, list(context.values()))
        self.least, self.kept = new_seconds[best], {other: extended[other][best] for other in context}
        return rows[best], columns[best]

    def _distinguished(self, node: int, at: int) -> Indices | None:
        """The classes of a node that matter to nodes before a place of the order; None if nothing reads it."""
        reads = self.reads[node]
        count = bisect_left(reads, at, key=lambda read: read[0])
        if count == 0:
            return None
        size = count
        while size > 1 and (node, size) not in self.distinguished_classes:
            size -= 1
        distinguished = self.distinguished_classes.setdefault((node, size), reads[0][1])
        for number in range(size, count):
            distinguished = classes([distinguished, reads[number][1]])
            self.distinguished_classes[node, number + 1] = distinguished
        return distinguished

    def _best(self, seconds: Floats, context: Sequence[Indices]) -> Indices:
        """The partial answers to keep: of those with one context the cheapest, and of these as many as are allowed."""
        if not seconds.size:
            return np.zeros(0, dtype=np.intp)
        key = np.zeros(seconds.size, dtype=np.intp)
        for classes_of_node in context:
            if int(key.max()) > _MOST_KEY:
                key = np.unique(key, return_inverse=True)[1].astype(np.intp)
            key = key * (int(classes_of_node.max()) + 1) + classes_of_node
        in_order = np.lexsort((seconds, key))
        first = np.ones(seconds.size, dtype=np.bool_)
        first[1:] = key[in_order[1:]] != key[in_order[:-1]]
        best = in_order[first]
        if best.size > self.width:
            best = best[np.argsort(seconds[best], kind="stable")]
            self.dropped = min(self.dropped, float(seconds[best[self.width]]))
            best = best[: self.width]
        return best


def eliminate(factors: Factors, upper: float = math.inf) -> Enclosure:
    """The proven optimum of a problem by exact tables, whatever their size; None if it is not below `upper`."""
    tables = MiniBuckets(factors.factors, factors.order.nodes, math.inf)
    result = Beam(factors, tables, min(upper, factors.beyond), width=1).run()
    return Enclosure(choice=result.choice, bound=min(tables.bound, upper))


def enclose(factors: Factors, upper: float, gap: float) -> Enclosure:
    """An answer below `upper` seconds, if one is found, and a bound; it ends once they are `_CLOSE`, or gains nothing.

    Where the bound of small tables leaves a gap that exact ones can afford to close, the answer is the optimum.
    """
    best: tuple[int, ...] | None = None
    bound = bound_before = -math.inf
    for limit, beam_entries in zip(_LIMITS, _KEPT, strict=True):
        if math.isfinite(bound) and factors.order.entries(limit) > _ENTRIES:
            break
        tables = MiniBuckets(factors.factors, factors.order.nodes, limit)
        width = math.ceil(beam_entries / max(1, sum(allowed.size > 1 for allowed in factors.allowed)))
        bound = max(bound, min(tables.bound, upper))
        if meet(upper, bound, gap):
            break
        if factors.is_affordable:
            del tables
            return eliminate(factors, upper)
        upper_before = upper
        result = Beam(factors, tables, min(upper * (1 - gap), factors.beyond), width).run()
        if result.choice is not None and (seconds := factors.problem.evaluate(result.choice)) < upper:
            best, upper = result.choice, seconds
        bound = max(bound_before, bound, min(result.bound, upper))
        if meet(upper, bound, max(gap, _CLOSE)) or (upper, bound) == (upper_before, bound_before):
            break
        bound_before = bound
    return Enclosure(choice=best, bound=bound)
