"""The best choice of most nodes at once, a few staying: variable elimination along a small-width order.

A node whose costs with all its neighbours fit a small table is eliminated: the table keeps its best strategy for every
combination of theirs, and its cost becomes a table of theirs. Where no node fits, one of the neighbours in the way
stays at the strategy it has. What is not staying is then at its optimum, given what stays.

Reference: Dechter, Bucket elimination (AIJ 1999), with conditioning on a cutset.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import prod

import numpy as np

from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices

Table = tuple[tuple[int, ...], Floats]
"""Nodes, and costs with one dimension for each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Best:
    """The best `strategy` of an eliminated node under every choice of its `parents`."""

    node: int
    parents: tuple[int, ...]
    strategy: Indices


class Elimination:
    """Eliminates the nodes of one problem, again and again, in orders that a random generator varies."""

    def __init__(self, problem: GraphProblem) -> None:
        self.sizes = [node_costs.size for node_costs in problem.costs]
        self.around: list[dict[int, Floats]] = [{} for _ in self.sizes]
        for edge in problem.edges:
            known = self.around[edge.source].get(edge.target)
            costs = edge.costs if known is None else known + edge.costs
            self.around[edge.source][edge.target], self.around[edge.target][edge.source] = costs, costs.T

    def improve(
        self,
        costs: list[Floats],
        choice: Indices,
        *,
        entries: int,
        rng: np.random.Generator,
        free: Indices | None = None,
    ) -> Indices:
        """`choice` with all but a few nodes (of `free`) at their optimum at node `costs`; tables up to `entries`."""
        nodes = list(range(len(costs))) if free is None else [int(n) for n in free]
        run = _Run(self, costs, choice, set(nodes))
        noise = rng.random(len(costs)) * 2.0
        heap = [(len(run.near[n]) + noise[n], n) for n in nodes]
        heapq.heapify(heap)
        while heap:
            priority, node = heapq.heappop(heap)
            if node not in run.remaining:
                continue
            now = len(run.near[node]) + noise[node]
            if now > priority + 1e-9:
                heapq.heappush(heap, (now, node))
                continue
            touched = set(run.near[node])
            run.make_room(node, entries, noise)
            if node in run.remaining:
                run.eliminate(node)
            for other in touched:
                if other in run.remaining:
                    heapq.heappush(heap, (len(run.near[other]) + noise[other], other))
        return run.decode()

    def region(self, size: int, rng: np.random.Generator) -> Indices:
        """Up to `size` nodes around a random one, the nearest first."""
        nodes = {int(rng.integers(len(self.sizes))): None}
        queue = list(nodes)
        for node in queue:
            fresh = [n for n in self.around[node] if n not in nodes][: size - len(nodes)]
            nodes |= dict.fromkeys(fresh)
            queue += fresh
        return np.array(queue, dtype=np.intp)


class _Run:
    """One elimination: the tables that each node is part of, and who shares one with whom."""

    def __init__(self, graph: Elimination, costs: list[Floats], choice: Indices, free: set[int]) -> None:
        self.sizes, self.choice, self.remaining = graph.sizes, choice.copy(), set(free)
        self.node_costs = {n: costs[n].copy() for n in free}
        self.near: dict[int, set[int]] = {n: set() for n in free}
        self.tables: dict[int, list[Table]] = {n: [] for n in free}
        self.steps: list[_Best] = []
        for node in free:
            for other, between in graph.around[node].items():
                if other not in free:
                    self.node_costs[node] += between[:, choice[other]]
                elif node < other:
                    self._add(((node, other), between))

    def make_room(self, node: int, entries: int, noise: Floats) -> None:
        """Lets neighbours stay, the best connected first, until the table of `node` fits."""
        while len(self.near[node]) > 0:
            near = self.near[node]
            if self.sizes[node] * prod(self.sizes[n] for n in near) <= entries:
                return
            crowded = max((*near, node), key=lambda n: (len(self.near[n]), noise[n]))
            self._stay(crowded)
            if crowded == node:
                return

    def eliminate(self, node: int) -> None:
        """Puts the best strategy of `node`, by those of its neighbours, in its place."""
        parents = tuple(sorted(self.near[node]))
        axes = {n: at for at, n in enumerate(parents)} | {node: len(parents)}
        total = self.node_costs[node].reshape((1,) * len(parents) + (-1,))
        for nodes, table in self.tables[node]:
            order = sorted(range(len(nodes)), key=lambda at: axes[nodes[at]])
            shape = [1] * len(axes)
            for n in nodes:
                shape[axes[n]] = self.sizes[n]
            total = total + table.transpose(order).reshape(shape)
        self.steps.append(_Best(node=node, parents=parents, strategy=total.argmin(axis=-1)))
        self._forget(node)
        if len(parents) == 1:
            self.node_costs[parents[0]] += total.min(axis=-1)
        elif parents:
            self._add((parents, total.min(axis=-1)))

    def decode(self) -> Indices:
        """The choice, once every node is eliminated or stays."""
        for step in reversed(self.steps):
            self.choice[step.node] = step.strategy[tuple(self.choice[p] for p in step.parents)]
        return self.choice

    def _stay(self, node: int) -> None:
        at = self.choice[node]
        tables = self.tables[node]
        self._forget(node)
        for nodes, table in tables:
            rest = tuple(n for n in nodes if n != node)
            cut: Floats = np.take(table, at, axis=nodes.index(node))
            if len(rest) == 1:
                self.node_costs[rest[0]] += cut
            else:
                self._add((rest, cut))

    def _add(self, table: Table) -> None:
        nodes = table[0]
        for node in nodes:
            self.tables[node].append(table)
            self.near[node].update(nodes)
            self.near[node].discard(node)

    def _forget(self, node: int) -> None:
        self.remaining.discard(node)
        for other in self.near[node]:
            self.near[other].discard(node)
            self.tables[other] = [table for table in self.tables[other] if node not in table[0]]
        self.near[node], self.tables[node] = set(), []
