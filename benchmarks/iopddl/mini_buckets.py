"""A lower bound of a GraphProblem without its limits, and a choice near it, in one sweep: mini-bucket elimination.

A node is eliminated by minimising the sum of all tables it is part of. Where that sum is too large a table, its terms
fall into several sums, each minimised apart: the node may then take a different strategy in each, which bounds from
below. Before, the sums exchange costs until each asks the same of the node (their least costs by its strategy agree).
Backwards, each node takes its best strategy given those eliminated after it, all sums together.

Reference: Dechter and Rish, Mini-buckets (JACM 2003); moment matching of Ihler, Flerova, Dechter and Otten (UAI 2012).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import prod

import numpy as np

from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices

_Scope = tuple[int, tuple[int, ...]]
"""The number of a table, and its nodes in the order of its dimensions."""

_Term = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """Tables that are added up: each by its number, the order its dimensions take, and the shape that gives.

    Dimensions of the sum are those of `parents`, then the node. What is left without the node becomes table `result`,
    or part of the costs of an only parent.
    """

    parents: tuple[int, ...]
    terms: tuple[_Term, ...]
    result: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """The sums in which a node is eliminated, and the nodes of each table that mentions it."""

    node: int
    sums: tuple[_Sum, ...]
    scopes: tuple[_Scope, ...]


class MiniBuckets:
    """Bounds one problem at changing node and edge costs; tables have at most `entries` or those of one edge."""

    def __init__(self, problem: GraphProblem, *, entries: int, rng: np.random.Generator) -> None:
        sizes = [node_costs.size for node_costs in problem.costs]
        layout = _Layout(sizes, [(edge.source, edge.target) for edge in problem.edges])
        self.buckets = layout.eliminate_all(entries, rng.random(len(sizes)) * 0.5)
        self.tables = layout.tables

    def run(self, costs: list[Floats], edges: list[Floats]) -> tuple[float, Indices]:
        """A lower bound of what any choice costs, and a choice."""
        remaining = [node.copy() for node in costs]
        tables = [*edges, *[np.zeros(0)] * (self.tables - len(edges))]
        bound = 0.0
        for bucket in self.buckets:
            sums = [_add(tables, part) for part in bucket.sums] or [np.zeros(remaining[bucket.node].size)]
            least = [total.min(axis=tuple(range(total.ndim - 1))) for total in sums]
            mean = (sum(least) + remaining[bucket.node]) / len(sums)
            for part, total, mine in zip(bucket.sums or (_NOTHING,), sums, least, strict=True):
                # What one sum forbids, every sum does.
                shift = np.subtract(mean, mine, where=np.isfinite(mean), out=np.full(mean.size, np.inf))
                rest = (total + shift).min(axis=-1)
                floor = rest.min()
                floor = floor if not part.parents or np.isfinite(floor) else 0.0
                bound += float(floor)
                if len(part.parents) == 1:
                    remaining[part.parents[0]] += rest - floor
                elif part.parents:
                    tables[part.result] = rest - floor
        return bound, self._decode(remaining, tables)

    def _decode(self, remaining: list[Floats], tables: list[Floats]) -> Indices:
        """Each node at its best, from the last one eliminated back to the first."""
        choice = [0] * len(remaining)
        for bucket in reversed(self.buckets):
            total = remaining[bucket.node]
            for number, nodes in bucket.scopes:
                at = tuple([slice(None) if n == bucket.node else choice[n] for n in nodes])
                total = total + tables[number][at]
            choice[bucket.node] = int(total.argmin())
        return np.array(choice, dtype=np.intp)


_NOTHING = _Sum(parents=(), terms=(), result=-1)


def _add(tables: list[Floats], part: _Sum) -> Floats:
    number, order, shape = part.terms[0]
    total = tables[number].transpose(order).reshape(shape)
    for number, order, shape in part.terms[1:]:
        total = total + tables[number].transpose(order).reshape(shape)
    return total


class _Layout:
    """The tables that each node is part of while nodes are eliminated one by one; no numbers yet."""

    def __init__(self, sizes: list[int], edges: list[tuple[int, int]]) -> None:
        self.sizes, self.bits = sizes, [float(np.log2(size)) for size in sizes]
        self.scopes: list[dict[int, tuple[int, ...]]] = [{} for _ in sizes]
        self.near: list[dict[int, int]] = [{} for _ in sizes]
        self.tables = 0
        for nodes in edges:
            self._put(nodes)

    def eliminate_all(self, entries: int, noise: Floats) -> tuple[_Bucket, ...]:
        """Every node, always one of the smallest sums, with `noise` [nodes] between equal ones."""

        def size(node: int) -> float:
            return self.bits[node] + sum(self.bits[n] for n in self.near[node]) + float(noise[node])

        buckets: list[_Bucket] = []
        heap = [(size(n), n) for n in range(len(self.sizes))]
        heapq.heapify(heap)
        done = [False] * len(self.sizes)
        while heap:
            known, node = heapq.heappop(heap)
            if done[node]:
                continue
            now = size(node)
            if now > known + 1e-9:
                heapq.heappush(heap, (now, node))
                continue
            done[node] = True
            around = list(self.near[node])
            buckets.append(self._eliminate(node, entries))
            for other in around:
                heapq.heappush(heap, (size(other), other))
        return tuple(buckets)

    def _eliminate(self, node: int, entries: int) -> _Bucket:
        scopes = list(self.scopes[node].items())
        for scope in scopes:
            self._take(scope)
        sums = tuple(self._sum(node, group) for group in self._groups(scopes, entries))
        return _Bucket(node=node, sums=sums, scopes=tuple(scopes))

    def _put(self, nodes: tuple[int, ...]) -> int:
        number = self.tables
        self.tables += 1
        for node in nodes:
            self.scopes[node][number] = nodes
            near = self.near[node]
            for other in nodes:
                if other != node:
                    near[other] = near.get(other, 0) + 1
        return number

    def _take(self, scope: _Scope) -> None:
        number, nodes = scope
        for node in nodes:
            del self.scopes[node][number]
            near = self.near[node]
            for other in nodes:
                if other != node:
                    near[other] -= 1
                    if not near[other]:
                        del near[other]

    def _groups(self, scopes: list[_Scope], entries: int) -> list[list[_Scope]]:
        groups: list[tuple[set[int], list[_Scope]]] = []
        for scope in sorted(scopes, key=lambda scope: -prod(self.sizes[n] for n in scope[1])):
            for nodes, members in groups:
                if prod(self.sizes[n] for n in nodes.union(scope[1])) <= entries:
                    nodes.update(scope[1])
                    members.append(scope)
                    break
            else:
                groups.append((set(scope[1]), [scope]))
        return [members for _, members in groups]

    def _sum(self, node: int, scopes: list[_Scope]) -> _Sum:
        parents = tuple(sorted({n for _, nodes in scopes for n in nodes} - {node}))
        places = {n: at for at, n in enumerate((*parents, node))}
        terms: list[_Term] = []
        for number, nodes in scopes:
            shape = [1] * len(places)
            for n in nodes:
                shape[places[n]] = self.sizes[n]
            order = sorted(range(len(nodes)), key=lambda at, nodes=nodes: places[nodes[at]])
            terms.append((number, tuple(order), tuple(shape)))
        result = self._put(parents) if len(parents) > 1 else -1
        return _Sum(parents=parents, terms=tuple(terms), result=result)
