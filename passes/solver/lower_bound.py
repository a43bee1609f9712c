r"""A lower bound of all answers to a sharding problem, from prices of placements, wherever these come from.

A resharding from placement i to j is charged to the nodes at its ends: the node that makes the value pays the price
$\pi_i$ of i more, the reader the price of j less. With the prices of every edge k of a group g that pays R,

    bound = sum_n min_s (c_{n,s} + sum_{k from n} \pi_{k,before(s)} - sum_{k to n} \pi_{k,after(s)})
          + sum_g min_i sum_j min(0, R_{g,i,j} - sum_{k in g} max(0, \pi_{k,i} - \pi_{k,j}))  -  sum_p \lambda_p

for any prices: readers of a group that want one placement pay R once, and each is charged its difference of prices.
What a group that reads a sum pays less than its readers are charged depends on i (`sums.spare`); for every group with
sums the price of i is lowered by that, so that the node that makes the sum bears it, in place of the second line. A
budget p adds $\lambda_p$ times the share of it that a strategy takes to c, and the share that a copy takes to R. The
prices of a linear program of the merged problem, shared out to the nodes and edges that were merged, make it tight; no
property of that program is relied upon.

Reference: Lagrangian duality; Wainwright, Jaakkola and Willsky, MAP estimation via agreement on trees (IEEE Trans.
Information Theory 51, 2005) for problems of pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.solver.dual_ascent import Messages, PricedEdge
from passes.solver.edge_flows import Shapes
from passes.solver.factors import Prices
from passes.solver.problem import ROUNDING, Edge, Floats, Indices, ShardingProblem, paid
from passes.solver.sums import spare
from passes.solver.symmetry import MergedProblem

_NEGLIGIBLE = 1e-3
"""The share of a gap that a node may leave open: what most of it is due to is looked at first, and then the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`seconds` that no answer goes below; `reduced` [nodes][strategies] are what strategies cost at the `prices`.

    A strategy of reduced cost r more than the least of its node is in no answer below `seconds` + r. `prices` are by
    the `id` of an edge, `spared` [groups] the seconds, 0 or less, by which prices charge a group's readers too much.
    """

    seconds: float
    reduced: tuple[Floats, ...]
    spared: Mapping[int, float]
    prices: Mapping[int, Prices]
    budget_prices: tuple[float, ...]

    def fix_strategies(self, problem: ShardingProblem, upper: float) -> ShardingProblem:
        """The problem without the strategies that no answer below `upper` seconds has."""
        strategy_seconds: list[Floats] = []
        for node_seconds, reduced in zip(problem.seconds, self.reduced, strict=True):
            spare = upper - self.seconds + reduced.min()
            strategy_seconds.append(np.where(reduced <= spare + abs(upper) * ROUNDING, node_seconds, np.inf))
        return ShardingProblem(
            seconds=tuple(strategy_seconds), edges=problem.edges, budgets=problem.budgets, cache=problem.cache
        )


def lifted(
    problem: ShardingProblem, merged: MergedProblem, prices: Sequence[Prices], budget_prices: Sequence[float]
) -> Bound:
    """The bound of a whole problem at the `prices` [edges of the merged problem] and of its budgets.

    A merged edge stands for many, and so do several that are alike: each edge of the whole has the mean of their
    prices.
    """
    count = max(merged.alike, default=-1) + 1
    times = np.bincount([merged.alike[number] for number in merged.edges], minlength=count)
    mean: list[Prices | None] = [None] * count
    for at, (rows, columns) in zip(merged.alike, prices, strict=True):
        so_far = mean[at]
        rows, columns = rows / times[at], columns / times[at]
        mean[at] = (rows, columns) if so_far is None else (so_far[0] + rows, so_far[1] + columns)
    prices_by_edge = {
        id(e): mean_prices
        for e, n in zip(problem.edges, merged.edges, strict=True)
        if (mean_prices := mean[merged.alike[n]])
    }
    return priced(problem, prices_by_edge, budget_prices)


def priced(problem: ShardingProblem, prices: Mapping[int, Prices], budget_prices: Sequence[float]) -> Bound:
    """The bound of a problem at the `prices` of its edges, by `id`, and of its budgets."""
    reduced = [seconds.copy() for seconds in problem.seconds]
    for price, budget in zip(budget_prices, problem.budgets, strict=True):
        for node, nbytes in budget.nbytes.items():
            reduced[node] += price * nbytes / budget.limit
    for edge in problem.edges:
        rows, columns = prices[id(edge)]
        reduced[edge.source] += rows[edge.before]
        reduced[edge.target] -= columns[edge.after]
    groups, settled = _Groups(problem, budget_prices), dict(prices)
    spared = {group: groups.settle(group, edges, settled, reduced) for group, edges in problem.groups.items()}
    return _summed(reduced, spared, settled, budget_prices)


def _summed(
    reduced: Sequence[Floats], spared: Mapping[int, float], prices: Mapping[int, Prices], budget_prices: Sequence[float]
) -> Bound:
    total = sum(float(seconds.min()) for seconds in reduced) + sum(spared.values()) - sum(budget_prices)
    return Bound(
        seconds=total, reduced=tuple(reduced), spared=spared, prices=prices, budget_prices=tuple(budget_prices)
    )


def raised(problem: ShardingProblem, bound: Bound, nodes: Collection[int], passes: int) -> Bound:
    """A bound at least as high, with the prices of edges among some nodes improved by message passing.

    The readers of a group share what it pays in proportion to what each is charged already.
    """
    places = {node: at for at, node in enumerate(sorted(nodes))}
    ends, allowed = _Ends(), [np.flatnonzero(np.isfinite(problem.seconds[node])) for node in places]
    groups, priced_edges = _Groups(problem, bound.budget_prices), list[PricedEdge]()
    edges: list[tuple[Edge, Indices, Indices]] = []
    changed: dict[int, Sequence[Edge]] = {}
    for group, readers in problem.groups.items():
        if not any(edge.source in places and edge.target in places for edge in readers):
            continue
        changed[group] = readers
        for edge, seconds in zip(readers, groups.shares(group, readers, bound.prices), strict=True):
            if edge.source not in places or edge.target not in places or edge.source == edge.target:
                continue
            source, target = places[edge.source], places[edge.target]
            rows, written = ends.of(edge.before, allowed[source])
            columns, read = ends.of(edge.after, allowed[target])
            remaining = groups.remaining(seconds, bound.prices[id(edge)], rows, columns)
            priced_edges.append(PricedEdge(source=source, target=target, made=written, read=read, seconds=remaining))
            edges.append((edge, rows, columns))
    messages = Messages(
        [bound.reduced[node][node_allowed] for node, node_allowed in zip(places, allowed, strict=True)],
        priced_edges,
    )
    messages.run(passes)
    prices, reduced = dict(bound.prices), list(bound.reduced)
    for node in places:
        reduced[node] = reduced[node].copy()
    for (edge, rows, columns), (making, reading) in zip(edges, messages.prices(), strict=True):
        more = np.zeros(edge.seconds.shape[0]), np.zeros(edge.seconds.shape[1])
        more[0][rows], more[1][columns] = making, reading
        reduced[edge.source] += more[0][edge.before]
        reduced[edge.target] -= more[1][edge.after]
        edge_prices = prices[id(edge)]
        prices[id(edge)] = edge_prices[0] + more[0], edge_prices[1] + more[1]
    for edges_of_group in changed.values():
        reduced[edges_of_group[0].source] = reduced[edges_of_group[0].source].copy()
    groups = _Groups(problem, bound.budget_prices)
    settled = {group: groups.settle(group, readers, prices, reduced) for group, readers in changed.items()}
    spared = {**bound.spared, **settled}
    candidate = _summed(reduced, spared, prices, bound.budget_prices)
    return candidate if candidate.seconds > bound.seconds else bound


def loose(problem: ShardingProblem, bound: Bound, choice: Sequence[int], hops: int) -> set[int]:
    """The nodes at which an answer costs more than the bound counts there, and those a few edges away from them.

    An answer and a bound meet if each strategy chosen is its node's least at the prices, and each group pays what its
    readers are charged (complementary slackness): what is missing at each adds up to the gap.
    """
    missing = [float(reduced[s] - reduced.min()) for reduced, s in zip(bound.reduced, choice, strict=True)]
    lacking = {group: -spared for group, spared in bound.spared.items()}
    for group, edges in problem.groups.items():
        for edge in edges:
            rows, columns = bound.prices[id(edge)]
            lacking[group] -= float(rows[edge.before[choice[edge.source]]] - columns[edge.after[choice[edge.target]]])
        lacking[group] += sum(paid(edges, choice))
    negligible = _NEGLIGIBLE * (sum(missing) + sum(lacking.values()))
    nodes = {node for node, seconds in enumerate(missing) if seconds > negligible}
    for group, seconds in lacking.items():
        if seconds > negligible:
            nodes |= {node for edge in problem.groups[group] for node in (edge.source, edge.target)}
    around: list[set[int]] = [set() for _ in problem.seconds]
    for edge in problem.edges:
        around[edge.source].add(edge.target)
        around[edge.target].add(edge.source)
    for _ in range(hops):
        nodes |= {neighbour for node in nodes for neighbour in around[node]}
    return nodes


class _Ends:
    """The placements of allowed strategies at an end of an edge, and which each has; found once for equal ones."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, bytes], tuple[Indices, Indices, Indices]] = {}

    def of(self, placed: Indices, allowed: Indices) -> tuple[Indices, Indices]:
        """Placements in order, and their places by allowed strategy."""
        key = (id(placed), allowed.tobytes())
        if key not in self.known:
            self.known[key] = (placed, *np.unique(placed[allowed], return_inverse=True))
        return self.known[key][1:]


class _Groups:
    """The costs of groups beyond what the prices charge their readers."""

    def __init__(self, problem: ShardingProblem, budget_prices: Sequence[float]) -> None:
        self.shapes = problem.cache.kept(Shapes)
        self.budgets = [
            (price, budget) for price, budget in zip(budget_prices, problem.budgets, strict=True) if price > 0
        ]
        self.known: dict[tuple[object, ...], tuple[object, float]] = {}
        self.shared: dict[tuple[object, ...], tuple[object, list[Floats]]] = {}
        self.uncharged: dict[tuple[int, ...], tuple[object, Floats]] = {}
        self.lowered: dict[tuple[object, ...], tuple[object, Floats, Prices]] = {}
        self.placed: dict[tuple[int, ...], tuple[object, tuple[list[object], list[Indices]]]] = {}

    def settle(self, group: int, edges: Sequence[Edge], prices: dict[int, Prices], reduced: Sequence[Floats]) -> float:
        """The seconds, 0 or less, by which prices charge a group's readers too much.

        Of a group with sums there are none left: the `prices` of its first edge's rows are lowered, and with them what
        the strategies that make the sum cost.
        """
        if (first := edges[0]).sums is None:
            return self.least(group, edges, prices)
        reader_prices, copies = [prices[id(edge)] for edge in edges], self._copies(group)
        key = _key(edges, reader_prices, copies)
        if key not in self.lowered:
            by_row = self._by_row(edges, reader_prices, copies)
            rows, columns = reader_prices[0]
            self.lowered[key] = ((edges, reader_prices), by_row, (rows + by_row, columns))
        _, by_row, prices[id(first)] = self.lowered[key]
        reduced[first.source][...] += by_row[first.before]
        return 0.0

    def _by_row(self, edges: Sequence[Edge], prices: Sequence[Prices], copies: Mapping[object, float]) -> Floats:
        """The seconds, 0 or less, by which the prices of each row charge the readers of a group with sums too much."""
        cost, charged = self._table(edges, prices, copies)[:2]
        by_row, sums = np.minimum(0.0, cost - charged).sum(axis=1), edges[0].sums
        assert sums is not None
        if (rows := np.flatnonzero(sums.rows & (charged > 0).any(axis=1))).size:
            charges = [making[rows, None] - reading for making, reading in prices]
            by_row[rows] = np.minimum(0.0, spare(edges, charges, rows, copies).seconds)
        return by_row

    def least(self, group: int, edges: Sequence[Edge], prices: Mapping[int, Prices]) -> float:
        """The least cost of a group, less its readers' differences of prices: 0, or less where prices are too high."""
        reader_prices, copies = [prices[id(edge)] for edge in edges], self._copies(group)
        if len(edges) == 1 and not copies:
            return float(np.minimum(0.0, _left(edges[0], reader_prices[0])).sum(axis=1).min())
        key = _key(edges, reader_prices, copies)
        if key not in self.known:
            cost, charged = self._table(edges, reader_prices, copies)[:2]
            self.known[key] = ((edges, reader_prices), float(np.minimum(0.0, cost - charged).sum(axis=1).min()))
        return self.known[key][1]

    def shares(self, group: int, edges: Sequence[Edge], prices: Mapping[int, Prices]) -> list[Floats]:
        """The cost of each reader [rows, columns], so that all together pay no more than the group does."""
        reader_prices, copies = [prices[id(edge)] for edge in edges], self._copies(group)
        key = _key(edges, reader_prices, copies)
        if key not in self.shared:
            self.shared[key] = ((edges, reader_prices), self._shares(edges, reader_prices, copies))
        return self.shared[key][1]

    def _shares(self, edges: Sequence[Edge], prices: Sequence[Prices], copies: Mapping[object, float]) -> list[Floats]:
        if len(edges) == 1 and not copies:
            return [edges[0].weight * edges[0].seconds]
        cost, charged, readers, places = self._table(edges, prices, copies)
        room = np.where(np.isfinite(cost), np.maximum(0.0, cost - charged), np.inf) / np.maximum(readers, 1)
        scale = np.divide(cost, charged, out=np.ones_like(cost), where=(charged > cost) & (charged > 0))
        shared = [
            room[:, at] + scale[:, at] * np.maximum(0.0, rows[:, None] - columns[None, :])
            for at, (rows, columns) in zip(places, prices, strict=True)
        ]
        if (sums := edges[0].sums) is not None and (at := np.flatnonzero(sums.rows)).size:
            charges = [rows[at, None] - columns for rows, columns in prices]
            more = spare(edges, charges, at, copies).by_reader
            for seconds, charged_here, beyond in zip(shared, charges, more, strict=True):
                seconds[at] = charged_here + np.maximum(0.0, beyond) / len(edges)
        return shared

    def remaining(self, seconds: Floats, prices: Prices, rows: Indices, columns: Indices) -> Floats:
        """A reader's share beyond what its prices charge it, [rows, columns]; one array for equal ones."""
        key = (id(seconds), id(prices), id(rows), id(columns))
        if key not in self.uncharged:
            beyond = (seconds - prices[0][:, None] + prices[1][None, :])[rows[:, None], columns]
            self.uncharged[key] = ((seconds, prices, rows, columns), beyond)
        return self.uncharged[key][1]

    def _copies(self, group: int) -> dict[object, float]:
        """Seconds that a copy to each placement costs at the budgets' prices."""
        seconds: dict[object, float] = {}
        for price, budget in self.budgets:
            for label, size in budget.copies.get(group, {}).items():
                seconds[label] = seconds.get(label, 0.0) + price * size / budget.limit
        return seconds

    def _table(
        self, edges: Sequence[Edge], prices: Sequence[Prices], copies: Mapping[object, float]
    ) -> tuple[Floats, Floats, Floats, list[Indices]]:
        """Tables by row and placement read: paid, charged to readers, how many may read; those of readers by edge."""
        labels, places = self._places(edges)
        n_rows = edges[0].seconds.shape[0]
        cost, charged = np.full((n_rows, len(labels)), np.inf), np.zeros((n_rows, len(labels)))
        readers = np.zeros(len(labels))
        for edge, at, (rows, columns) in zip(edges, places, prices, strict=True):
            cost[:, at] = np.minimum(cost[:, at], edge.weight * edge.seconds)
            charged[:, at] += np.maximum(0.0, rows[:, None] - columns[None, :])
            readers[at] += 1
        if copies:
            prices_of_copies = np.array([copies.get(label, 0.0) for label in labels])
            cost += np.where(self._is_elsewhere(edges[0], labels), prices_of_copies, 0.0)
        return cost, charged, readers, places

    def _is_elsewhere(self, edge: Edge, labels: Sequence[object]) -> NDArray[np.bool_] | bool:
        """Whether a value lies in another placement than one that is read, [rows, labels]."""
        if not edge.origins:
            return True
        return self.shapes.numbers(edge.origins)[:, None] != np.array([self.shapes.number(label) for label in labels])

    def _places(self, edges: Sequence[Edge]) -> tuple[list[object], list[Indices]]:
        """The placements that a group's readers may want, and which of them each edge's columns are."""
        key = tuple(id(edge.labels) for edge in edges)
        if key not in self.placed:
            labels = list(dict.fromkeys(label for edge in edges for label in edge.labels))
            place = {label: at for at, label in enumerate(labels)}
            places = [np.array([place[label] for label in edge.labels], dtype=np.intp) for edge in edges]
            self.placed[key] = (edges, (labels, places))
        return self.placed[key][1]


def _key(edges: Sequence[Edge], prices: Sequence[Prices], copies: Mapping[object, float]) -> tuple[object, ...]:
    """A key that is equal for groups of equal costs; equal layers mostly share their arrays."""
    return (
        *(id(edge.seconds) for edge in edges),
        *(edge.weight for edge in edges),
        *map(id, prices),
        *sorted(copies.items(), key=str),
    )


def _left(edge: Edge, prices: Prices) -> Floats:
    """The cost of a single reader beyond the difference of prices that it is charged, [rows, columns]."""
    return edge.weight * edge.seconds - np.maximum(0.0, prices[0][:, None] - prices[1][None, :])
