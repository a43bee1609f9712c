"""The layers of a forward pass that choose what they keep for the backward pass: numbered modules, or even parts.

Layers from which stages are made are in `passes.layers.cuts` and `passes.layers.repeats`: there the work of the
backward pass counts too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import numpy as np

from passes.ir import Graph, phase
from passes.layers.cuts import MARGIN, crossing_nbytes, work
from passes.layers.forward import forward_nodes

_PARTS = 8
_CROSSING = 1.2
"""The most parts where no modules are numbered, and the most that may cross between two, as a multiple of the least
that does. Few parts keep the choices few; a cut through an attention or a feed-forward block crosses more than 1.2
times the bytes of one between them. `python -m benchmarks.memory_limit` shows what steps without numbered modules keep.
"""

_NUMBERED = re.compile(r"(?:^|/)jvp\([^()]*\)/(?:[^/]*/)*?([A-Za-z_.]*?[_.]?)(\d+)(?=/|$)")


def numbered_modules(graph: Graph) -> tuple[int, ...]:
    """The first node of every numbered module (`Block_0`, `Block_1`, ...), and of what follows the last one.

    Empty where there are none; of several kinds of modules the most frequent counts.
    """
    forward = [i for i in forward_nodes(graph) if phase(graph.nodes[i]) == "forward"]
    named = [(i, (match[1], match[2])) for i in forward if (match := _NUMBERED.search(graph.nodes[i].scope))]
    firsts: dict[tuple[str, str], int] = {}
    for index, name in named:
        firsts.setdefault(name, index)
    prefix, many = Counter(prefix for prefix, _ in firsts).most_common(1)[0] if firsts else ("", 0)
    if many < 2:
        return ()
    last = max(index for index, name in named if name[0] == prefix)
    starts = [index for (p, _), index in firsts.items() if p == prefix]
    return (*sorted(starts), *[i for i in forward if i > last][:1])


def is_most_work(graph: Graph, chosen: Collection[int]) -> bool:
    """Whether at least half of the work of the forward pass is in the chosen nodes."""
    nodes = forward_nodes(graph)
    flops = work(graph, nodes)
    return 2 * float(sum(f for node, f in zip(nodes, flops, strict=True) if node in chosen)) >= float(flops.sum())


def even_parts(graph: Graph) -> tuple[int, ...]:
    """The first node of each of several parts of the forward pass of even work, cut where few bytes cross."""
    nodes = forward_nodes(graph)
    crossing, flops = crossing_nbytes(graph, nodes), work(graph, nodes)
    done = np.cumsum(flops) / max(float(flops.sum()), 1.0)
    inner = [i for i in range(1, len(nodes)) if crossing[i] > 0 and MARGIN < done[i - 1] < 1 - MARGIN]
    fewest_nbytes = min((crossing[i] for i in inner), default=0.0)
    places = [i for i in inner if crossing[i] <= _CROSSING * fewest_nbytes]
    shares = [k / _PARTS for k in range(1, _PARTS)] if places else []
    cuts = {min(places, key=lambda i: abs(float(done[i - 1]) - share)) for share in shares}
    return (nodes[0], *(nodes[i] for i in sorted(cuts)))
