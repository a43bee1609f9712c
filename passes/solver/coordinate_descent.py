"""Coordinate descent: an answer to a sharding problem improved one node at a time, the others fixed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from passes.solver.problem import Edge, Floats, Indices, ShardingProblem
from passes.solver.sums import Reduced

_ROUNDS = 8
"""Passes over all nodes at most: work, so that an answer does not depend on the machine's load."""

_PENALTY = 1e3
"""The cost of bytes beyond a budget, as a multiple of the whole answer's seconds for the whole budget: a thousandth too
much costs as much as the answer. Of 240 descents from random answers to problems of 14 nodes, 94 ended within the
budget with 1, 143 with 10, and the same 149 with 100 and any more."""

_MOST_ENTRIES = 4_000_000
"""Numbers that are kept of the costs that descents of a problem met: 32 MB. It bounds memory, and changes no answer."""


def coordinate_descent(problem: ShardingProblem, choice: Sequence[int]) -> tuple[int, ...]:
    """An answer that costs at most as much: each node in turn takes its best strategy, until none changes.

    Where budgets are exceeded, bytes come first. A node is looked at again once a node that it shares a value with has
    changed, or any node where budgets couple them.
    """
    current, around = list(choice), problem.around
    tables, usage = _Tables(problem, current), _Usage(problem, current)
    stale = [True] * len(current)
    for _ in range(_ROUNDS):
        for node, keep in enumerate(current):
            if not stale[node]:
                continue
            stale[node] = False
            seconds, nbytes = tables.of(node)
            costs = seconds if nbytes is None else seconds + usage.penalties(nbytes, keep)
            if costs[keep] <= costs.min():
                continue
            current[node] = int(np.argmin(costs))
            if nbytes is not None:
                usage.change(nbytes, keep, current[node])
                stale = [True] * len(current)
            for edge in itertools.chain.from_iterable(around[node]):
                stale[edge.source] = stale[edge.target] = True
            tables.moved(node)
        if not any(stale):
            break
    return tuple(current)


class _Tables:
    """The cost of every strategy of a node while the others stay, cached until a node that it shares a value with
    changes.
    """

    def __init__(self, problem: ShardingProblem, choice: list[int]) -> None:
        self.problem, self.choice = problem, choice
        self.met = problem.remembered.kept(_Met)
        self.known: dict[int, tuple[Floats, Floats | None]] = {}

    def of(self, node: int) -> tuple[Floats, Floats | None]:
        """(seconds [strategies], bytes [budgets, strategies]), the latter None for a node that no budget counts."""
        if node not in self.known:
            self.known[node] = self.met.of(self.problem, node, self.choice)
        return self.known[node]

    def moved(self, node: int) -> None:
        """Forgets the costs of the nodes that share a value with this one."""
        for edge in itertools.chain.from_iterable(self.problem.around[node]):
            for other in {edge.source, edge.target} - {node}:
                self.known.pop(other, None)


class _Met:
    """The costs of a problem's nodes and of the groups around them under the strategies of others that were met so far:
    descents of one problem mostly start from answers that differ in a few nodes.
    """

    def __init__(self) -> None:
        self.paid = _Paid()
        self.others: dict[int, list[tuple[int, ...]]] = {}
        self.entries = 0
        self.groups: dict[tuple[int, ...], tuple[Floats | float, Floats | None]] = {}
        self.nodes: dict[tuple[int, ...], tuple[Floats, Floats | None]] = {}

    def of(self, problem: ShardingProblem, node: int, choice: Sequence[int]) -> tuple[Floats, Floats | None]:
        """(seconds [strategies], bytes [budgets, strategies]), the latter None for a node that no budget counts."""
        others = self.others.get(node)
        if others is None:
            others = self.others[node] = [_others(edges, node) for edges in problem.around[node]]
        keys = [(node, at, *[choice[other] for other in of_group]) for at, of_group in enumerate(others)]
        whole = tuple(itertools.chain((node,), *keys))
        if (costs := self.nodes.get(whole)) is None:
            if self.entries > _MOST_ENTRIES:
                self.groups.clear()
                self.nodes.clear()
                self.entries = 0
            costs = self.nodes[whole] = self._costs(problem, node, choice, keys)
            self.entries += costs[0].size * (1 + (0 if costs[1] is None else len(costs[1])))
        return costs

    def _costs(
        self, problem: ShardingProblem, node: int, choice: Sequence[int], keys: Sequence[tuple[int, ...]]
    ) -> tuple[Floats, Floats | None]:
        """The costs of a node, by those of the groups around it, which have these keys."""
        groups = problem.around[node]
        costs = [self._of_group(problem, edges, node, choice, key) for edges, key in zip(groups, keys, strict=True)]
        seconds = problem.seconds[node] + sum(paid for paid, _ in costs)
        copied = [nbytes for _, nbytes in costs if nbytes is not None]
        if not copied and not any(node in budget.nbytes for budget in problem.budgets):
            return seconds, None
        none = np.zeros(problem.seconds[node].size)
        nbytes = np.array([budget.nbytes.get(node, none) for budget in problem.budgets], dtype=np.float64)
        for of_group in copied:
            nbytes += of_group
        return seconds, nbytes

    def _of_group(
        self, problem: ShardingProblem, edges: Sequence[Edge], node: int, choice: Sequence[int], key: tuple[int, ...]
    ) -> tuple[Floats | float, Floats | None]:
        """The seconds of a group under every strategy of a node, and the bytes of its copies if a budget counts any."""
        if (costs := self.groups.get(key)) is None:
            tables = problem.copied.get(edges[0].group)
            nbytes = None if tables is None else self.paid.nbytes(edges, tables, node, choice)
            costs = self.groups[key] = self.paid.seconds(edges, node, choice), nbytes
            self.entries += problem.seconds[node].size * (1 + (0 if nbytes is None else len(nbytes)))
        return costs


def _others(edges: Sequence[Edge], node: int) -> tuple[int, ...]:
    """The nodes of a group beside this one."""
    return tuple(dict.fromkeys(end for edge in edges for end in (edge.source, edge.target) if end != node))


class _Paid:
    """The cost of groups of edges under every strategy of a node, the others fixed; placements are known by number."""

    def __init__(self) -> None:
        self.known: dict[object, int] = {}
        self.numbers: dict[int, Indices] = {}

    def seconds(self, edges: Sequence[Edge], node: int, choice: Sequence[int]) -> Floats | float:
        """The cost of a group, equal reshardings once."""
        if len(edges) == 1:
            edge = edges[0]
            return edge.weight * edge.seconds[_ends(edge, node, choice)]
        reshardings: dict[tuple[object, object], tuple[Indices | int, Floats]] = {}
        reduced = Reduced()
        for edge in edges:
            before, after = _ends(edge, node, choice)
            label = self._labels(edge)[after]
            same = (before if edge.source != node else id(before), label if edge.target != node else id(edge.after))
            if same not in reshardings:
                seconds = reduced.seconds(edge.sums, before, after, edge.seconds[before, after])
                reshardings[same] = before + len(edge.seconds) * label, edge.weight * seconds
        total, paid_for = 0.0, list[Indices | int]()
        for resharding, seconds in reshardings.values():
            for paid in paid_for:
                seconds = np.where(resharding == paid, 0.0, seconds)
            total = total + seconds
            paid_for.append(resharding)
        return total

    def nbytes(self, edges: Sequence[Edge], tables: Sequence[Floats], node: int, choice: Sequence[int]) -> Floats:
        """The bytes that a group is copied to [budgets, strategies or 1], equal copies once, by the edges' tables."""
        total, counted = np.zeros((len(tables[0]), 1)), dict[object, tuple[Indices | int, Floats]]()
        for edge, table in zip(edges, tables, strict=True):
            before, after = _ends(edge, node, choice)
            label = self._labels(edge)[after]
            same = (before if edge.source != node else id(before), label if edge.target != node else id(edge.after))
            if same in counted:
                continue
            nbytes = table[:, before, after].reshape(len(table), -1)
            for other, already in counted.values():
                nbytes = np.where((label == other) & (already > 0), 0.0, nbytes)
            total = total + nbytes
            counted[same] = label, nbytes
        return total

    def _labels(self, edge: Edge) -> Indices:
        """The numbers of the placements that an edge's columns stand for; edges mostly share them."""
        if id(edge.labels) not in self.numbers:
            numbers = [self.known.setdefault(label, len(self.known)) for label in edge.labels]
            self.numbers[id(edge.labels)] = np.array(numbers, dtype=np.intp)
        return self.numbers[id(edge.labels)]


def _ends(edge: Edge, node: int, choice: Sequence[int]) -> tuple[Indices | int, Indices | int]:
    """An edge's row and column, [strategies] of `node` at the ends where that is."""
    before = edge.before if edge.source == node else edge.before[choice[edge.source]]
    return before, edge.after if edge.target == node else edge.after[choice[edge.target]]


class _Usage:
    """The bytes that an answer takes of every budget, kept up to date while its nodes change."""

    def __init__(self, problem: ShardingProblem, choice: Sequence[int]) -> None:
        self.usage = np.array([problem.usage(budget, choice) for budget in problem.budgets])
        self.limits = np.array([budget.limit for budget in problem.budgets])
        seconds = problem.evaluate(choice) if problem.budgets else 0.0
        self.price = _PENALTY * (seconds if np.isfinite(seconds) and seconds > 0 else 1.0)

    def penalties(self, nbytes: Floats, current: int) -> Floats:
        """Seconds for the bytes beyond the budgets, [strategies], of a node that takes `nbytes` [budgets, strategies]
        of them.
        """
        nbytes_after = (self.usage - nbytes[:, current])[:, None] + nbytes
        return self.price * np.maximum(nbytes_after / self.limits[:, None] - 1.0, 0.0).sum(axis=0)

    def change(self, nbytes: Floats, old: int, new: int) -> None:
        """Records that a node of these bytes has left its `old` strategy."""
        self.usage += nbytes[:, new] - nbytes[:, old]
