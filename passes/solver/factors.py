"""Factors: costs of a few nodes together as tables, of which a sharding problem is the sum.

A table has a dimension for each of its nodes, indexed not by strategies but by *classes* of strategies that the table
cannot tell apart: a resharding sees the placement of a value, which many strategies have in common. Tables of several
terms tell apart what one of them does, and stay as small as that allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from passes.solver.problem import Edge, Floats, Indices, ShardingProblem, Sums
from passes.solver.sums import Reduced

Prices = tuple[Floats, Floats]
"""Seconds of the rows and of the columns of an edge."""

GROUP_ENTRIES = 200_000
"""Entries of the table of one group, beyond which its readers are charged in parts: 1.6 MB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factor:
    """Seconds `table` [classes of each node] that `nodes` cost together; `classes[k]` [strategies] are those of node k.

    Strategies are numbered among those that are allowed.
    """

    nodes: tuple[int, ...]
    classes: tuple[Indices, ...]
    table: Floats

    @classmethod
    def of_node(cls, node: int, seconds: Floats) -> Self:
        """The seconds of a node's own strategies."""
        return cls(nodes=(node,), classes=(np.arange(seconds.size),), table=seconds)

    def without(self, node: int) -> Factor:
        """The least over a node's classes, of the other nodes."""
        at = self.nodes.index(node)
        return Factor(
            nodes=self.nodes[:at] + self.nodes[at + 1 :],
            classes=self.classes[:at] + self.classes[at + 1 :],
            table=self.table.min(axis=at),
        )

    def least(self, node: int) -> Floats:
        """The least seconds under each strategy of a node."""
        at = self.nodes.index(node)
        other_axes = tuple(axis for axis in range(self.table.ndim) if axis != at)
        return self.table.min(axis=other_axes)[self.classes[at]]

    def at(self, strategies: Mapping[int, Indices]) -> Floats:
        """The seconds of many choices at once: the nodes' `strategies`, arrays that broadcast together."""
        index = tuple(
            node_classes[strategies[node]] for node, node_classes in zip(self.nodes, self.classes, strict=True)
        )
        return self.table[index]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The cost of the reshardings of one value for its readers, equal ones paid once: exactly, and as a sum of factors.

    The factors add up to the exact seconds where all readers fit into one table, and to less where they do not. A
    `share` of the seconds is paid; with `reach`, the seconds of sums [placements before, names], of what a part of the
    readers costs at least beside any others.
    """

    nodes: tuple[int, ...]
    edges: tuple[GroupEdge, ...]
    factors: tuple[Factor, ...]
    share: float = 1.0
    reach: Floats | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the factors add up to the exact cost."""
        return len(self.factors) == 1

    def at(self, strategies: Mapping[int, Indices]) -> Floats:
        """The exact seconds of many choices at once."""
        if self.reach is not None:
            return self._beside_others(self.reach, strategies)
        total, paid_for, reduced = np.zeros(()), list[Indices](), Reduced()
        for edge in self.edges:
            seconds, label, priced = edge.at(strategies, reduced)
            for paid in paid_for:
                seconds = np.where(label == paid, 0.0, seconds)
            total = total + self.share * seconds - priced
            paid_for.append(label)
        return total

    def _beside_others(self, reach: Floats, strategies: Mapping[int, Indices]) -> Floats:
        """The least that these readers cost, wherever the sum is reduced to for readers that are not here.

        That is no more the fewer they are, which is what lets parts of a group pay parts of it.
        """
        least: Floats = np.array(np.inf)
        for at in range(-1, reach.shape[1]):
            total = reach[self.edges[0].before[strategies[self.edges[0].source]], at] if at >= 0 else np.zeros(())
            paid_for: list[Indices] = []
            for edge in self.edges:
                seconds, label, _ = edge.at(strategies, Reduced())
                seconds = edge.from_either(strategies, at, seconds)
                for paid in paid_for:
                    seconds = np.where(label == paid, 0.0, seconds)
                total = total + seconds
                paid_for.append(label)
            least = np.minimum(least, total)
        return self.share * least - sum(edge.at(strategies, Reduced())[2] for edge in self.edges)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupEdge:
    """A reader of a group: rows, columns and `seconds` as its edge has them, for the allowed strategies at its ends.

    `labels` [columns] are numbers that equal placements share. `prices` of rows and of columns are what the nodes at
    the ends have taken over: the edge pays less by that of its row, and more by that of its column.
    """

    source: int
    target: int
    before: Indices
    after: Indices
    seconds: Floats
    labels: Indices
    prices: Prices | None = None
    sums: Sums | None = None

    def at(self, strategies: Mapping[int, Indices], reduced: Reduced) -> tuple[Floats, Indices, Floats]:
        """The seconds, the placement read, and the difference of prices, of many choices at once."""
        before, after = self.before[strategies[self.source]], self.after[strategies[self.target]]
        priced = np.zeros(()) if self.prices is None else self.prices[0][before] - self.prices[1][after]
        seconds = reduced.seconds(self.sums, before, after, self.seconds[before, after])
        return seconds, self.labels[after], priced

    def from_either(self, strategies: Mapping[int, Indices], at: int, seconds: Floats) -> Floats:
        """The least of the `seconds` from the source and those from where a sum was reduced to, the name `at`."""
        before, after = self.before[strategies[self.source]], self.after[strategies[self.target]]
        if self.sums is None or at < 0:
            return seconds
        onward = self.sums.onward[at, self.sums.names[after]]
        return np.where(self.sums.rows[before], np.minimum(seconds, onward), seconds)


def classes(class_arrays: Sequence[Indices]) -> Indices:
    """The coarsest classes of strategies that refine all those given, numbered from 0."""
    if all(class_array is class_arrays[0] for class_array in class_arrays[1:]):
        return class_arrays[0]
    key = class_arrays[0]
    for class_array in class_arrays[1:]:
        key = _numbered(key * (int(class_array.max()) + 1) + class_array)
    return key


def _numbered(values: Indices) -> Indices:
    return np.unique(values, return_inverse=True)[1].astype(np.intp)


def scope(factors: Iterable[Factor]) -> dict[int, Indices]:
    """The nodes of several factors, with the classes that their sum depends on."""
    arrays_of: dict[int, list[Indices]] = {}
    for factor in factors:
        for node, class_array in zip(factor.nodes, factor.classes, strict=True):
            arrays_of.setdefault(node, []).append(class_array)
    return {node: classes(arrays) for node, arrays in arrays_of.items()}


def total(factors: Sequence[Factor], node: int) -> Factor:
    """The sum of factors, one or more, over the nodes whose strategies it tells apart, and `node`.

    Others would be dimensions of one entry, and NumPy has 64 at most.
    """
    if len(factors) == 1:
        return factors[0]
    among = {n: node_classes for n, node_classes in scope(factors).items() if n == node or node_classes.any()}
    nodes = tuple(sorted(among))
    place = {node: axis for axis, node in enumerate(nodes)}
    table = np.zeros([int(among[n].max()) + 1 for n in nodes])
    for factor in factors:
        index: list[Indices] = []
        for n, class_array in zip(factor.nodes, factor.classes, strict=True):
            narrower = class_array[:1]
            if n in place:
                narrower = np.zeros(table.shape[place[n]], dtype=np.intp)
                narrower[among[n]] = class_array
            index.append(narrower)
        told_apart = [n for n in factor.nodes if n in place]
        part = factor.table[np.ix_(*index)].reshape([table.shape[place[n]] for n in told_apart])
        shape = [1] * len(nodes)
        for n in told_apart:
            shape[place[n]] = table.shape[place[n]]
        table += part.transpose(np.argsort([place[n] for n in told_apart])).reshape(shape)
    return Factor(nodes=nodes, classes=tuple(among[n] for n in nodes), table=table)


def groups(
    problem: ShardingProblem, allowed: Sequence[Indices], beyond: float, prices: Mapping[int, Prices]
) -> list[Group]:
    """The groups of a problem among the `allowed` strategies; what is impossible costs `beyond` seconds.

    `prices` are those of edges, by the edge's `id`, that the nodes have taken over.

    Where the exact table of a group would have more than `GROUP_ENTRIES`, its readers are cut into parts, and a part
    of k among n readers pays k/n of what it wants: together at most what all of them pay.
    """
    numbers: dict[object, int] = {}
    named: dict[int, tuple[object, Indices]] = {}

    def labels(edge: Edge) -> Indices:
        if id(edge.labels) not in named:
            label_numbers = [numbers.setdefault(label, len(numbers)) for label in edge.labels]
            named[id(edge.labels)] = (edge.labels, np.array(label_numbers, dtype=np.intp))
        return named[id(edge.labels)][1]

    all_groups: list[Group] = []
    for edges in problem.groups.values():
        edges_of_group = tuple(
            GroupEdge(
                source=edge.source,
                target=edge.target,
                before=edge.before[allowed[edge.source]],
                after=edge.after[allowed[edge.target]],
                seconds=edge.weight * np.where(np.isfinite(edge.seconds), edge.seconds, beyond),
                labels=labels(edge),
                prices=prices.get(id(edge)),
                sums=edge.sums and edge.sums.scaled(edge.weight, beyond),
            )
            for edge in edges
        )
        all_groups.append(_group(edges_of_group))
    return all_groups


def _group(edges: tuple[GroupEdge, ...]) -> Group:
    by_target: dict[int, list[GroupEdge]] = {}
    for edge in edges:
        by_target.setdefault(edge.target, []).append(edge)
    rows = _numbered(edges[0].before)
    reads = {
        node: classes([_numbered(edge.after) for edge in edges_of_target])
        for node, edges_of_target in by_target.items()
    }
    parts: list[list[int]] = [[]]
    entries = float(rows.max() + 1)
    for node, class_array in reads.items():
        if parts[-1] and entries * (class_array.max() + 1) > GROUP_ENTRIES:
            parts.append([])
            entries = float(rows.max() + 1)
        parts[-1].append(node)
        entries *= class_array.max() + 1
    source, reach = edges[0].source, _reach(edges) if len(parts) > 1 else None
    factors = tuple(
        _table(source, rows, [(reads[node], by_target[node]) for node in part], len(part) / len(reads), reach)
        for part in parts
    )
    return Group(nodes=(source, *reads), edges=edges, factors=factors)


def _reach(edges: Sequence[GroupEdge]) -> Floats | None:
    """The seconds from each placement of a sum to where readers of its group want it; None of what is no sum."""
    if edges[0].sums is None:
        return None
    reach = np.full((edges[0].seconds.shape[0], edges[0].sums.ends.size), np.inf)
    for edge in edges:
        assert edge.sums is not None
        reach[:, edge.sums.names] = np.minimum(reach[:, edge.sums.names], edge.seconds)
    return np.where(edges[0].sums.ends, reach, np.inf)


def _table(
    source: int,
    rows: Indices,
    readers: Sequence[tuple[Indices, Sequence[GroupEdge]]],
    share: float,
    reach: Floats | None,
) -> Factor:
    """The factor of a share of the cost of some readers of a group."""
    class_arrays = (rows, *(read for read, _ in readers))
    nodes = (source, *(edges[0].target for _, edges in readers))
    counts = [int(class_array.max()) + 1 for class_array in class_arrays]
    first = [np.unique(class_array, return_index=True)[1] for class_array in class_arrays]  # a strategy of every class
    strategies = {
        node: representatives.reshape([-1 if axis == at else 1 for axis in range(len(nodes))])
        for at, (node, representatives) in enumerate(zip(nodes, first, strict=True))
    }
    part = Group(
        nodes=nodes, edges=tuple(edge for _, edges in readers for edge in edges), factors=(), share=share, reach=reach
    )
    table = np.broadcast_to(part.at(strategies), counts)
    return Factor(nodes=nodes, classes=class_arrays, table=np.ascontiguousarray(table))
