"""Where a forward pass may be cut: positions that little crosses, between which the work is even.

Reference: layer clustering of Zheng et al., "Alpa" (OSDI 2022), section 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from passes.errors import PlanningError, explain
from passes.ir import Graph
from passes.layers.forward import forward_nodes
from passes.rules import rule_of

UNEVEN = ((0.1, 0.25, 0.5), (1.0, 3.0))
"""How far the largest stage may be above the average: the first that can be had, however much crosses, before more."""

CROSSING = (1.2, 2.0, 8.0, np.inf)
"""How much may cross a cut, as a multiple of the least that crosses anywhere."""


def crossing_nbytes(body: Graph, nodes: Sequence[int]) -> NDArray[np.float64]:
    """Bytes that each cut sends forward, [len(nodes) + 1]: cut i is before node i; the ends send nothing."""
    place = {node: i for i, node in enumerate(nodes)}
    change = np.zeros(len(nodes) + 2)
    for node, at in place.items():
        for value in body.nodes[node].outputs:
            last = max((place[r] for r in body.consumers.get(value, ()) if r in place), default=at)
            change[at + 1] += body.types[value].nbytes
            change[last + 1] -= body.types[value].nbytes
    return np.cumsum(change)[: len(nodes) + 1]


def work(body: Graph, nodes: Sequence[int]) -> NDArray[np.float64]:
    """Flops of each node, loops by their trips."""
    return np.array([_flops(body, node) for node in nodes])


def _flops(body: Graph, index: int) -> float:
    node = body.nodes[index]
    if not node.subgraphs:
        return rule_of(node, body).flops
    trips = node.params.get("length", 1)
    inside = max(sum(_flops(inner, i) for i in range(len(inner.nodes))) for inner in node.subgraphs)
    return inside * (trips if isinstance(trips, int) else 1)


def even_cuts(body: Graph, n_stages: int, pattern: str = "") -> tuple[int, ...]:
    """The first body node of each of `n_stages` stages: as even as can be where little crosses.

    With a `pattern` of module names, only where one such module gives way to another.

    Raises PlanningError where there are fewer places to cut than that.
    """
    if n_stages == 1:
        return (0,)
    nodes = forward_nodes(body)
    crossing, flops = crossing_nbytes(body, nodes), work(body, nodes)
    total = np.concatenate([[0.0], np.cumsum(flops)])
    heavy = [i for i in range(1, len(nodes)) if total[i] > 0.02 * total[-1] and total[i] < 0.98 * total[-1]]
    if pattern:
        heavy = [i for i in heavy if _module(body, nodes[i], pattern) != _module(body, nodes[i - 1], pattern)]
    least = min((crossing[i] for i in heavy if crossing[i] > 0), default=0.0)
    tries = ((most, uneven) for tier in UNEVEN for most, uneven in itertools.product(CROSSING, tier))
    for most, uneven in tries:
        places = [i for i in heavy if crossing[i] <= most * least]
        found = _cheapest(places, crossing, total, n_stages, (1 + uneven) * total[-1] / n_stages)
        if found:
            return (0, *(nodes[i] for i in found))
    named = f"; layers={pattern!r} may fit no module" if pattern else ""
    raise PlanningError(
        explain(
            f"stages={n_stages}",
            f"the forward pass has {len(heavy)} places where it can be cut, too few or too uneven for that many stages",
            "",
            "ask for fewer stages, or plan without a pipeline" + named,
        )
    )


def _module(body: Graph, index: int, pattern: str) -> str:
    """The outermost module of a node's name stack that fits, empty for none."""
    return next((name for name in body.nodes[index].scope.split("/") if fnmatchcase(name, pattern)), "")


def _cheapest(
    places: Sequence[int],
    crossing: NDArray[np.float64],
    total: NDArray[np.float64],
    n_stages: int,
    limit: float,
) -> tuple[int, ...]:
    """Cuts at `n_stages` - 1 of the places so that no stage has more than `limit` flops, the least bytes crossing."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(n_stages - 1):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        begins, known = np.array(list(best), dtype=np.intp), list(best.values())
        costs, before = np.array([cost for cost, _ in known]), total[begins]
        for place in places:
            reached = np.where((begins < place) & (total[place] - before <= limit), costs + crossing[place], np.inf)
            least = float(reached.min(initial=np.inf))
            if least < np.inf:
                after[place] = least, min((*known[i][1], place) for i in np.flatnonzero(reached == least).tolist())
        best = after
    ends = [one for begin, one in best.items() if total[-1] - total[begin] <= limit]
    return min(ends)[1] if ends else ()
