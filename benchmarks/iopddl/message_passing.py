"""Lower bounds of a GraphProblem without its limits: sequential tree-reweighted messages.

A message from s to t is a function of t's strategies; it moves costs along an edge and changes no total. With messages
m, node costs are c_s + sum_t m_ts and edge costs C_st - m_st - m_ts. A pass visits nodes in order, and gives each edge
onward a share 1/n of its node's costs (n: the larger number of edges, onward or back), which the message takes along as
far as the other end is sure to pay it. What every choice pays adds up to the bound: after any pass, at any messages.

Limits enter as prices: prices_t a byte at time t add to node costs, and `bound - sum_t prices_t limits_t` holds for
every choice within the limits (Lagrange).

Reference: Kolmogorov, Convergent tree-reweighted message passing for energy minimization (IEEE Trans. PAMI 28, 2006):
TRW-S on monotonic chains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.iopddl.graph_problem import Floats, GraphProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Onward:
    """The edge from a node to one that the pass visits later; numbers of the messages there and back."""

    node: int
    costs: Floats
    there: int
    back: int


class Messages:
    """The messages of a problem; each pass improves them in place."""

    def __init__(self, problem: GraphProblem) -> None:
        self.sizes = [node_costs.size for node_costs in problem.costs]
        self.edges = problem.edges
        ahead: list[list[_Onward]] = [[] for _ in self.sizes]
        behind: list[list[_Onward]] = [[] for _ in self.sizes]
        self.sent: list[Floats] = [np.zeros(0)] * (2 * len(self.edges))
        for number, edge in enumerate(problem.edges):
            low, high = edge.source, edge.target
            costs = edge.costs
            if low > high:
                low, high, costs = high, low, costs.T
            up, down = 2 * number, 2 * number + 1
            ahead[low].append(_Onward(node=high, costs=np.ascontiguousarray(costs), there=up, back=down))
            behind[high].append(_Onward(node=low, costs=np.ascontiguousarray(costs.T), there=down, back=up))
            self.sent[up], self.sent[down] = np.zeros(costs.shape[1]), np.zeros(costs.shape[0])
        self.directions = (ahead, behind)
        self.shares = [1.0 / max(len(a), len(b), 1) for a, b in zip(ahead, behind, strict=True)]

    def run(self, costs: list[Floats], *, backward: bool) -> float:
        """One pass at these node costs: a lower bound of what any choice costs."""
        around, sent = self.directions[backward], self.sent
        beliefs = self._beliefs(costs)
        bound = 0.0
        order = range(len(costs) - 1, -1, -1) if backward else range(len(costs))
        for node in order:
            belief = beliefs[node]
            least = belief.min()
            bound += float(least)
            share = (belief - least) * self.shares[node]
            for onward in around[node]:
                message = ((share - sent[onward.back])[:, None] + onward.costs).min(axis=0)
                least = message.min()
                bound += float(least)
                message -= least
                beliefs[onward.node] += message - sent[onward.there]
                sent[onward.there] = message
        return bound

    def shifted(self, costs: list[Floats]) -> tuple[list[Floats], list[Floats]]:
        """Node and edge costs that add up to the same for every choice, with the messages moved along."""
        edges: list[Floats] = []
        for number, edge in enumerate(self.edges):
            up, down = self.sent[2 * number], self.sent[2 * number + 1]
            at_source, at_target = (down, up) if edge.source < edge.target else (up, down)
            edges.append(edge.costs - at_source[:, None] - at_target)
        return self._beliefs(costs), edges

    def _beliefs(self, costs: list[Floats]) -> list[Floats]:
        beliefs = [node_costs.copy() for node_costs in costs]
        for direction in self.directions:
            for node in direction:
                for onward in node:
                    beliefs[onward.node] += self.sent[onward.there]
        return beliefs
