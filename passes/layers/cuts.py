"""Cuts of a forward pass into parts of even work, at positions that few bytes cross.

Reference: layer clustering of Zheng et al., "Alpa" (OSDI 2022), section 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from passes.errors import PlanningError, explain
from passes.ir import Graph
from passes.layers.forward import forward_nodes
from passes.rules import rules_of

UNEVEN = ((0.1, 0.25, 0.5), (1.0, 3.0))
"""Bounds on how far the largest part may exceed the average work, as shares of it, tried in order; the first tier in
which there is a cut wins. A pipeline is as slow as its slowest stage, so more crossing bytes are accepted before parts
of twice the average (`python -m benchmarks.planning --pipeline` shows the stages).
"""

MARGIN = 0.02
"""The share of the work that must lie on both sides of a cut: few bytes cross next to the inputs and the loss, and a
stage of an embedding or a loss alone would be idle."""

CROSSING = (1.2, 2.0, 8.0, np.inf)
"""Bounds on the bytes that cross a cut, as multiples of the least that cross anywhere, tried in order.

Between the blocks of a transformer the residual stream crosses; inside a block, that and as much again, or four times
as much.
"""


Weigh = Callable[[Graph, Sequence[int]], NDArray[np.float64]]
"""The work of each part of a forward pass, in any unit, from the first nodes of all parts."""


def crossing_nbytes(body: Graph, nodes: Sequence[int]) -> NDArray[np.float64]:
    """Bytes [len(nodes) + 1] that cross each cut: cut i is before node i; nothing crosses the ends."""
    place = {node: i for i, node in enumerate(nodes)}
    change = np.zeros(len(nodes) + 2)
    for node, at in place.items():
        for value in body.nodes[node].outputs:
            last = max((place[r] for r in body.consumers.get(value, ()) if r in place), default=at)
            change[at + 1] += body.types[value].nbytes
            change[last + 1] -= body.types[value].nbytes
    return np.cumsum(change)[: len(nodes) + 1]


def work(body: Graph, nodes: Sequence[int]) -> NDArray[np.float64]:
    """Flops of each node; those of a loop's body count once for each trip."""
    return np.array([_flops(body, node) for node in nodes])


def _flops(body: Graph, index: int) -> float:
    node = body.nodes[index]
    if not node.subgraphs:
        return rules_of(body)[index].flops
    trips = node.params.get("length", 1)
    inside = max(sum(_flops(inner, i) for i in range(len(inner.nodes))) for inner in node.subgraphs)
    return inside * (trips if isinstance(trips, int) else 1)


def part_flops(body: Graph, firsts: Sequence[int]) -> NDArray[np.float64]:
    """Flops of the forward pass of each part, of which `firsts` are the first nodes."""
    nodes = forward_nodes(body)
    return np.add.reduceat(work(body, nodes), np.searchsorted(nodes, firsts))


def even_cuts(body: Graph, n_stages: int, pattern: str = "", weigh: Weigh = part_flops) -> tuple[int, ...]:
    """The first body node of each of `n_stages` stages of even work, cut where few bytes cross.

    With a `pattern` of module names, cuts are only where one matching module gives way to another. Raises PlanningError
    where there are too few places to cut.
    """
    if n_stages == 1:
        return (0,)
    nodes = forward_nodes(body)
    crossing, weights = crossing_nbytes(body, nodes), weigh(body, nodes)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    least, most = MARGIN * total[-1], (1 - MARGIN) * total[-1]
    inner = [i for i in range(1, len(nodes)) if least < total[i] < most]
    if pattern:
        inner = [i for i in inner if _module(body, nodes[i], pattern) != _module(body, nodes[i - 1], pattern)]
    fewest = min((crossing[i] for i in inner if crossing[i] > 0), default=0.0)
    tries = ((bound, uneven) for tier in UNEVEN for bound, uneven in itertools.product(CROSSING, tier))
    for bound, uneven in tries:
        places = [i for i in inner if crossing[i] <= bound * fewest]
        cuts = _cheapest(places, crossing, total, n_stages, (1 + uneven) * total[-1] / n_stages)
        if cuts:
            return (0, *(nodes[i] for i in cuts))
    named = f"; layers={pattern!r} may fit no module" if pattern else ""
    raise PlanningError(
        explain(
            f"stages={n_stages}",
            f"the forward pass has {len(inner)} places where it can be cut, too few or too uneven for that many stages",
            "",
            "ask for fewer stages, or plan without a pipeline" + named,
        )
    )


def _module(body: Graph, index: int, pattern: str) -> str:
    """The outermost module in a node's name stack that matches the pattern; empty for none."""
    return next((name for name in body.nodes[index].scope.split("/") if fnmatchcase(name, pattern)), "")


def _cheapest(
    places: Sequence[int],
    crossing: NDArray[np.float64],
    total: NDArray[np.float64],
    n_stages: int,
    limit: float,
) -> tuple[int, ...]:
    """The `n_stages` - 1 places where fewest bytes cross, no stage with more work than `limit`; empty if none are."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(n_stages - 1):
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        begins, partials = np.array(list(best), dtype=np.intp), list(best.values())
        costs, work_before = np.array([cost for cost, _ in partials]), total[begins]
        for place in places:
            reached = np.where(
                (begins < place) & (total[place] - work_before <= limit), costs + crossing[place], np.inf
            )
            cost = float(reached.min(initial=np.inf))
            if cost < np.inf:
                extended[place] = (
                    cost,
                    min((*partials[i][1], place) for i in np.flatnonzero(reached == cost).tolist()),
                )
        best = extended
    ends = [partial for begin, partial in best.items() if total[-1] - total[begin] <= limit]
    return min(ends)[1] if ends else ()
