"""The prices of a program's rows at which its relaxation starts, near its optimum, by dual ascent.

A row's price is what its value is worth in seconds. What is left of the costs of strategies at these prices, the least
of every node, adds up to a bound that is there before the relaxation is solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.solver.dual_ascent import Messages, PricedEdge
from passes.solver.edge_flows import Flow
from passes.solver.problem import Floats, Indices

_PASSES = 4
"""Passes of messages that find prices, before it is asked whether more would raise the bound."""

_RISES = 0.1
"""Where it may end the search, passes go on while they raise the bound by this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPrices:
    """Seconds that rows are worth (`of_rows`, empty without prices), the `costs` [nodes][allowed strategies] that are
    left at them, and a bound on all answers, `least_seconds`.
    """

    of_rows: Floats
    costs: tuple[Floats, ...]
    least_seconds: float = 0.0


def starting_prices(
    costs: Sequence[Floats], groups: Sequence[Sequence[Flow]], one_rows: Indices, n_rows: int, cutoff: float
) -> StartingPrices:
    """The prices of a program of `n_rows` rows whose nodes' strategies have these `costs` and stand in `one_rows`.

    `groups` are the flows of each group. With a finite `cutoff`, prices are improved while they raise the bound, until
    that is reached. The row that an edge lacks has no price.
    """
    flows = [(flow, len(group)) for group in groups for flow in group]
    messages = Messages(costs, [_priced_edge(flow, readers) for flow, readers in flows])
    bound_before = 0.0
    while True:
        messages.run(_PASSES)
        of_rows, remaining = np.zeros(n_rows), list(costs)
        for (flow, _), (making, reading) in zip(flows, messages.prices(), strict=True):
            placed, at = flow.shape.placed, np.concatenate([making, reading])
            at -= at[np.argmin(placed)]
            of_rows[flow.row + placed[placed >= 0]] = at[placed >= 0]
            making, reading = at[: making.size], at[making.size :]
            remaining[flow.edge.source] = remaining[flow.edge.source] + making[flow.shape.made]
            remaining[flow.edge.target] = remaining[flow.edge.target] - reading[flow.shape.read]
        of_rows[one_rows] = [node_costs.min() for node_costs in remaining]
        least_seconds = float(of_rows[one_rows].sum())
        if math.isinf(cutoff) or least_seconds >= cutoff or least_seconds < (1 + _RISES) * bound_before:
            return StartingPrices(of_rows=of_rows, costs=tuple(remaining), least_seconds=least_seconds)
        bound_before = least_seconds


def _priced_edge(flow: Flow, readers: int) -> PricedEdge:
    """A flow as dual ascent knows it, each of a group's `readers` paying its part."""
    edge, shape = flow.edge, flow.shape
    seconds = edge.weight * shape.matrix / readers
    return PricedEdge(source=edge.source, target=edge.target, made=shape.made, read=shape.read, seconds=seconds)
