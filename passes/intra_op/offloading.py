"""Optimizer state in the host's memory between steps: which inputs may be there, and a sharding problem that
chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from passes.cluster import Mesh
from passes.intra_op.assembly import Assembly
from passes.ir import Graph, StatePairs, phase
from passes.placement import Layout
from passes.plan import Plan
from passes.solver import Budget, Edge, Floats, Indices


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


def transfer_seconds(nbytes: Sequence[float], mesh: Mesh) -> float:
    """Seconds of a step in which arrays of these bytes come from the host's memory and go back."""
    return 2 * sum(nbytes) / mesh.cluster.group().device.host_bytes_per_second


def buffers(nbytes: Sequence[int]) -> int:
    """Bytes of a device for transfers: two arrays are there at a time, one being updated and one on its way."""
    return 2 * max(nbytes, default=0)


def away(nbytes: Sequence[int]) -> int:
    """Bytes that a device saves by arrays in the host's memory: all of them but the buffers of their transfers."""
    return max(sum(nbytes) - buffers(nbytes), 0)


def with_host(assembly: Assembly, inputs: Sequence[int]) -> Assembly:
    """The problem in which the state of these inputs, by position, may be in the host's memory between steps.

    The nodes that decide where some of them lie have every strategy twice; under the second half all of them are in the
    host's memory, and the seconds of their transfers are added.
    """
    idle: dict[int, tuple[int, ...]] = {}
    for position in inputs:
        if (site := assembly.root.sites.get(assembly.root.graph.inputs[position])) is not None:
            idle[site.node] = (*idle.get(site.node, ()), position)
    made = replace(assembly, idle=idle, on_device=assembly)
    seconds = list(assembly.problem.seconds)
    for node, nbytes in idle_nbytes(made).items():
        transfers = [transfer_seconds([of_placement], assembly.mesh) for of_placement in nbytes]
        seconds[node] = np.concatenate([seconds[node], seconds[node] + transfers])
    edges = _twice(assembly.problem.edges, idle)
    return replace(made, problem=replace(assembly.problem, seconds=tuple(seconds), edges=edges))


def with_offloaded(plan: Plan, graph: Graph, inputs: tuple[int, ...]) -> Plan:
    """The plan with the state of these inputs in the host's memory between steps, with the seconds of its transfers."""
    if not inputs:
        return plan
    host_nbytes = offloaded_nbytes(graph, plan.layout, inputs, plan.mesh)
    # What rests with the host is state that the apply phase alone reads: its bytes are of no other cause.
    state = plan.nbytes["optimizer state"] - away(host_nbytes)
    return replace(
        plan,
        offloaded=inputs,
        seconds={**plan.seconds, "offload": transfer_seconds(host_nbytes, plan.mesh)},
        nbytes={**plan.nbytes, "optimizer state": state},
        memory=plan.memory and plan.memory.less(away(host_nbytes)),
    )


def restricted_to(assembly: Assembly, on_device: Assembly) -> Assembly:
    """The problem with only those strategies whose placements a restricted form of its `on_device` problem has."""
    seconds = [
        np.where(np.isfinite(np.concatenate([kept, kept]) if node in assembly.idle else kept), every, np.inf)
        for node, (every, kept) in enumerate(zip(assembly.problem.seconds, on_device.problem.seconds, strict=True))
    ]
    return replace(assembly, problem=replace(assembly.problem, seconds=tuple(seconds)), on_device=on_device)


def idle_nbytes(assembly: Assembly) -> Mapping[int, Floats]:
    """The bytes of the idle state of each node that has some, under each of its placements."""
    graph, sites, mesh = assembly.root.graph, assembly.root.sites, assembly.mesh
    of_node: dict[int, Floats] = {}
    for node, inputs in assembly.idle.items():
        of_inputs = [
            [spec.local_nbytes(graph.types[value], mesh) for spec in sites[value].specs]
            for value in (graph.inputs[position] for position in inputs)
        ]
        of_node[node] = np.sum(np.array(of_inputs, dtype=np.float64), axis=0)
    return of_node


def row_with_host(row_of: Callable[[Assembly], Budget], assembly: Assembly) -> Budget:
    """The row of live bytes, in which idle state in the host's memory takes none."""
    row = row_of(assembly.on_device or assembly)
    nbytes = dict(row.nbytes)
    for node, spared in idle_nbytes(assembly).items():
        on_device = nbytes.get(node, np.zeros(spared.size))
        nbytes[node] = np.concatenate([on_device, on_device - spared])
    return replace(row, nbytes=nbytes)


def _twice(edges: Sequence[Edge], nodes: Mapping[int, object]) -> tuple[Edge, ...]:
    """The edges for nodes that have every strategy twice; what was one array stays one."""
    doubled: dict[int, Indices] = {}

    def twice(places: Indices) -> Indices:
        return doubled.setdefault(id(places), np.concatenate([places, places]))

    return tuple(
        replace(
            edge,
            before=twice(edge.before) if edge.source in nodes else edge.before,
            after=twice(edge.after) if edge.target in nodes else edge.after,
        )
        for edge in edges
    )
