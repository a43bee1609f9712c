"""GraphProblem: one strategy per node of a graph, at least total cost, within a limit of memory at every time.

    minimise    sum_n c_n(x_n) + sum_{e = (u, v)} C_e(x_u, x_v)
    subject to  sum_{i live at t} g_i(x_{node of i}) <= limit_t      for every time t

A cost that is infinite is forbidden. Usages g are counted over half-open intervals of time; a node may have several.
The problem is that of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """`costs` [strategies of source, strategies of target] of an edge; the two nodes differ."""

    source: int
    target: int
    costs: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """The memory that each strategy of `node` occupies, `nbytes` [strategies], at times start <= t < end."""

    node: int
    start: int
    end: int
    nbytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphProblem:
    """`costs` [strategies] of every node, the edges between them, and usages below `limits` [times]."""

    costs: tuple[Floats, ...]
    edges: tuple[Pair, ...] = ()
    usages: tuple[Usage, ...] = ()
    limits: Floats

    def cost(self, choice: Sequence[int] | Indices) -> float:
        """Total cost when node n takes strategy `choice[n]`; infinite if a forbidden one is among them."""
        picked = [float(node_costs[c]) for node_costs, c in zip(self.costs, choice, strict=True)]
        return sum(picked) + sum(float(e.costs[choice[e.source], choice[e.target]]) for e in self.edges)

    def profile(self, choice: Sequence[int] | Indices) -> Floats:
        """The bytes occupied at every time, [times]."""
        change = np.zeros(self.limits.size + 1)
        for usage in self.usages:
            nbytes = usage.nbytes[choice[usage.node]]
            change[usage.start] += nbytes
            change[usage.end] -= nbytes
        return np.cumsum(change)[:-1]

    def fits(self, choice: Sequence[int] | Indices) -> bool:
        """Whether the limits hold at every time, up to rounding of sums beyond 2^53."""
        return bool((self.profile(choice) <= self.limits * (1 + 1e-12)).all())
