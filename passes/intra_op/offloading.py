"""State that rests in the host's memory between steps: which inputs may, and the bytes that a device is spared."""

from __future__ import annotations

from collections.abc import Sequence

from passes.cluster import Mesh
from passes.ir import Graph, StatePairs, phase
from passes.placement import Layout


def resting(graph: Graph, state_pairs: StatePairs) -> tuple[int, ...]:
    """The inputs that the step returns again and reads in its apply phase alone: the optimizer's state, for one."""
    found: list[int] = []
    for _, position in state_pairs:
        value = graph.inputs[position]
        readers = [graph.nodes[r] for r in graph.consumers.get(value, ())]
        if graph.types[value].rank and all(phase(node) == "apply" and not node.subgraphs for node in readers):
            found.append(position)
    return tuple(sorted(found))


def held_nbytes(graph: Graph, layout: Layout, inputs: Sequence[int], mesh: Mesh) -> list[int]:
    """Bytes of each of these inputs on one device."""
    return [layout.inputs[i].local_nbytes(graph.types[graph.inputs[i]], mesh) for i in inputs]


def away(held: Sequence[int]) -> int:
    """Bytes that a device does not need at once: two of the arrays are there, one being updated, one on its way."""
    return max(sum(held) - 2 * max(held, default=0), 0)
