"""Optimizer state kept in the host's memory between steps: the inputs that may be, and the bytes that a device is
spared.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.cluster import Mesh
from passes.ir import Graph, StatePairs, phase
from passes.placement import Layout


def idle_state(graph: Graph, state_pairs: StatePairs) -> tuple[int, ...]:
    """The inputs that the step returns and reads in its apply phase alone, such as the optimizer's state."""
    positions: list[int] = []
    for _, position in state_pairs:
        value = graph.inputs[position]
        readers = [graph.nodes[r] for r in graph.consumers.get(value, ())]
        if graph.types[value].rank and all(phase(node) == "apply" and not node.subgraphs for node in readers):
            positions.append(position)
    return tuple(sorted(positions))


def offloaded_nbytes(graph: Graph, layout: Layout, inputs: Sequence[int], mesh: Mesh) -> list[int]:
    """Bytes of each of these inputs on one device."""
    return [layout.inputs[i].local_nbytes(graph.types[graph.inputs[i]], mesh) for i in inputs]


def transfer_seconds(nbytes: Sequence[int], mesh: Mesh) -> float:
    """Seconds of a step in which arrays of these bytes come from the host's memory and go back."""
    return 2 * sum(nbytes) / mesh.cluster.group().device.host_bytes_per_second


def away(nbytes: Sequence[int]) -> int:
    """Bytes that a device is spared: two of the arrays are always there, one being updated, one on its way."""
    return max(sum(nbytes) - 2 * max(nbytes, default=0), 0)
