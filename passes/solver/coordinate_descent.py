"""Coordinate descent: an answer to a sharding problem improved one node at a time, the others fixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from passes.solver.problem import Edge, Floats, Indices, ShardingProblem
from passes.solver.sums import Reduced

_ROUNDS = 8
"""Passes over all nodes at most: work, so that an answer does not depend on the machine's load."""

_PENALTY = 1e3
"""What bytes beyond a budget cost, as a multiple of the whole answer's seconds for the whole budget."""


def coordinate_descent(problem: ShardingProblem, choice: Sequence[int]) -> tuple[int, ...]:
    """An answer that costs at most as much: each node in turn takes its best strategy, until none changes.

    Where budgets are exceeded, bytes come first. A node is looked at again once one that it shares a value with has
    moved, or any at all where budgets tie them together.
    """
    current, around = list(choice), problem.around
    usage, paid = _Usage(problem, current), _Paid()
    stale = [True] * len(current)
    for node in (node for _ in range(_ROUNDS) if any(stale) for node in range(len(current)) if stale[node]):
        keep, stale[node] = current[node], False
        costs = problem.seconds[node] + sum(paid.seconds(edges, node, current) for edges in around[node])
        if problem.budgets:
            costs += usage.penalties(node, current, around[node])
        if costs[keep] <= costs.min():
            continue
        current[node] = int(np.argmin(costs))
        if problem.budgets:
            usage.change(node, keep, current, around[node])
            stale = [True] * len(current)
        for edge in (edge for edges in around[node] for edge in edges):
            stale[edge.source] = stale[edge.target] = True
    return tuple(current)


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


class _Alike:
    """The strategies of a node that place a group's value alike, for all problems that share one memory."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], tuple[list[Indices], Indices, Indices]] = {}

    def of(self, edges: Sequence[Edge], node: int) -> tuple[Indices, Indices]:
        """One strategy of each sort, and the number of the sort of every strategy."""
        ends = [end for edge in edges for end in _placed(edge, node)]
        key = tuple(map(id, ends))
        if key not in self.known:
            _, first, sort = np.unique(np.stack(ends), axis=1, return_index=True, return_inverse=True)
            self.known[key] = ends, first, sort.reshape(-1)
        return self.known[key][1:]


def _placed(edge: Edge, node: int) -> Iterator[Indices]:
    """The placements at the ends of an edge where a node is, by its strategy."""
    if edge.source == node:
        yield edge.before
    if edge.target == node:
        yield edge.after


class _Usage:
    """The bytes that an answer takes of every budget, kept up to date while its nodes change."""

    def __init__(self, problem: ShardingProblem, choice: Sequence[int]) -> None:
        self.problem = problem
        self.alike = problem.memory.kept(_Alike)
        self.usage = [problem.usage(budget, choice) for budget in problem.budgets]
        seconds = problem.evaluate(choice)
        self.price = _PENALTY * (seconds if np.isfinite(seconds) and seconds > 0 else 1.0)

    def penalties(self, node: int, choice: list[int], groups: Sequence[Sequence[Edge]]) -> Floats:
        """Seconds for the bytes beyond the budgets, under each strategy of a node."""
        size = self.problem.seconds[node].size
        total, current = np.zeros(size), choice[node]
        copied = {
            edges[0].group: self._copies(node, choice, edges)
            for edges in groups
            if any(edges[0].group in budget.copies for budget in self.problem.budgets)
        }
        for budget, used in zip(self.problem.budgets, self.usage, strict=True):
            nbytes = budget.nbytes.get(node)
            nbytes_after = np.full(size, used) if nbytes is None else used - nbytes[current] + nbytes
            for group, (labels, sort) in copied.items():
                if group in budget.copies:
                    nbytes_of = np.array([_nbytes(budget.copies[group], of_sort) for of_sort in labels])
                    nbytes_after += nbytes_of[sort] - nbytes_of[sort[current]]
            total += self.price * np.maximum(nbytes_after / budget.limit - 1.0, 0.0)
        return total

    def _copies(self, node: int, choice: list[int], edges: Sequence[Edge]) -> tuple[list[dict[object, None]], Indices]:
        """The placements that a group is copied to by sort of a node's strategies, and the sort of every strategy."""
        (first, sort), current = self.alike.of(edges, node), choice[node]
        labels: list[dict[object, None]] = []
        for strategy in first:
            choice[node] = int(strategy)
            labels.append(_labels(edges, choice))
        choice[node] = current
        return labels, sort

    def change(self, node: int, old: int, choice: list[int], groups: Sequence[Sequence[Edge]]) -> None:
        """Records that a node has left its `old` strategy."""
        new = choice[node]
        for index, budget in enumerate(self.problem.budgets):
            if (nbytes := budget.nbytes.get(node)) is not None:
                self.usage[index] += float(nbytes[new] - nbytes[old])
            for edges in groups:
                copies = budget.copies.get(edges[0].group)
                if copies is not None:
                    self.usage[index] += _nbytes(copies, _labels(edges, choice))
                    choice[node] = old
                    self.usage[index] -= _nbytes(copies, _labels(edges, choice))
                    choice[node] = new


def _labels(edges: Sequence[Edge], choice: Sequence[int]) -> dict[object, None]:
    """The placements that a group is copied to under an answer, each once, in order."""
    return dict.fromkeys(label for edge in edges if (label := edge.copies(choice)) is not None)


def _nbytes(copies: Mapping[object, float], labels: Iterable[object]) -> float:
    return sum(copies.get(label, 0.0) for label in labels)
