"""The best choice so far, and better ones near it: parts of the graph at their optimum under prices.

A proposal is the optimum of most of the graph, a few random nodes staying, or that of a region around one node. Bytes
have a price in it, scaled at random: with low prices a proposal spends memory and with high ones it saves some. Which
parts of it are taken, so that all fits, is a knapsack (`benchmarks.iopddl.recombination`).
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.iopddl.elimination import Elimination
from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices
from benchmarks.iopddl.recombination import Landscape, combine

# Chosen; what half and double of them do is not recorded.

_SWEEP_ENTRIES, _REGION_ENTRIES = 20_000, 50_000
"""Entries of the largest table where most of the graph is optimised, and where a region is."""

_REGIONS = (100, 300, 1000)
"""Nodes of a region, drawn from these."""

_REGION_SHARE = 0.5
"""The share of proposals that are of a region."""

_PRICE_SCALES = (0.0, 0.5, 0.8, 1.0, 1.0, 1.0, 1.25, 2.0)
"""Factors of the prices of bytes, drawn for each proposal."""


class LocalSearch:
    """Holds the best choice of a problem; every step keeps it or finds a better one."""

    def __init__(self, problem: GraphProblem, seed: int) -> None:
        self.land = Landscape(problem)
        self.elimination = Elimination(problem)
        self.rng = np.random.default_rng(seed)
        self.best: Indices = np.array([int(node_costs.argmin()) for node_costs in problem.costs], dtype=np.intp)

    def offer(self, choice: Indices) -> bool:
        """Takes from `choice` what improves the best; whether anything does."""
        mixed = combine(self.land, self.best, choice)
        better = mixed is not self.best
        self.best = mixed
        return better

    def optimum(self, priced: list[Floats], choice: Indices) -> Indices:
        """`choice` with most of its nodes at their optimum at node costs `priced`."""
        return self.elimination.improve(priced, choice, entries=_SWEEP_ENTRIES, rng=self.rng)

    def search(self, prices: Floats, until: float) -> bool:
        """Proposals around the best until a time of `time.monotonic`; whether any improved it."""
        better = False
        while time.monotonic() < until:
            priced = self.land.priced(prices * float(self.rng.choice(_PRICE_SCALES)))
            if self.rng.random() < _REGION_SHARE:
                free = self.elimination.region(int(self.rng.choice(_REGIONS)), self.rng)
                proposal = self.elimination.improve(priced, self.best, entries=_REGION_ENTRIES, rng=self.rng, free=free)
            else:
                proposal = self.optimum(priced, self.best)
            better |= self.offer(proposal)
        return better

    def fits(self) -> bool:
        """Whether the best is legal and within the limits."""
        return self.land.overflow(self.best) == 0 and bool(np.isfinite(self.land.cost(self.best)))
