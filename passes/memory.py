"""Peak bytes of one device under a plan, by cause: arguments, outputs that are not updated in place, and live values.

Only values that leave their bundle are counted as live: inside a bundle XLA fuses. Copies that reshardings make live
until their last reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.bundles import Grouping
from passes.ir import Graph
from passes.mesh import Mesh
from passes.moves import Layout, Move, Placement, Schedule


def peak_nbytes(
    graph: Graph,
    grouping: Grouping,
    mesh: Mesh,
    layout: Layout,
    schedule: Schedule,
    tied: Sequence[tuple[int, int]],
    donated: Sequence[bool],
) -> dict[str, int]:
    """Bytes of one device at the busiest point: `arguments`, `outputs` beyond donated arguments, `temporaries`."""
    held = sum(s.local_nbytes(graph.types[v], mesh) for v, s in zip(graph.inputs, layout.inputs, strict=True))
    in_place = {o for o, i in tied if donated[i]}
    fresh = {v: s for o, (v, s) in enumerate(zip(graph.outputs, layout.outputs, strict=True)) if o not in in_place}
    returned = sum(s.local_nbytes(graph.types[v], mesh) for v, s in fresh.items())
    live = _live_nbytes(graph, grouping, mesh, layout, schedule)
    return {"arguments": held, "outputs": returned, "temporaries": max(live, default=0)}


def _live_nbytes(graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, schedule: Schedule) -> list[int]:
    """Bytes of live values after each node, [nodes]; a loop or branch adds the busiest point of its largest body."""
    last = _last_use(graph, grouping)
    change = [0] * (len(graph.nodes) + 2)
    for index, (node, placement) in enumerate(zip(graph.nodes, layout.placements, strict=True)):
        for value, spec in zip(node.outputs, placement.results, strict=True):
            end = last.get(value, index)
            if _materialised(graph, grouping, value):
                nbytes = spec.local_nbytes(graph.types[value], mesh)
                change[index] += nbytes
                change[end + 1] -= nbytes
        for move in schedule.before[index]:
            nbytes = move.after.local_nbytes(graph.types[move.value], mesh)
            change[index] += nbytes
            change[_last_reader(graph, layout.placements, move, index) + 1] -= nbytes
        inside = _inside_nbytes(grouping, index, mesh, placement, schedule)
        change[index] += inside
        change[index + 1] -= inside
    return _running(change)


def _inside_nbytes(grouping: Grouping, index: int, mesh: Mesh, placement: Placement, schedule: Schedule) -> int:
    """The peak of a control node's largest body."""
    if index not in schedule.bodies:
        return 0
    bodies = zip(
        grouping.controls[index].bodies,
        grouping.bodies[index],
        placement.bodies,
        schedule.bodies[index],
        strict=True,
    )
    return max(max(_live_nbytes(b.graph, inner, mesh, inside, due), default=0) for b, inner, inside, due in bodies)


def _running(change: Sequence[int]) -> list[int]:
    totals: list[int] = []
    total = 0
    for step in change:
        total += step
        totals.append(total)
    return totals


def _last_use(graph: Graph, grouping: Grouping) -> Mapping[int, int]:
    """The last node that reads each value, aliases included."""
    last: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            last[value] = last[grouping.roots.get(value, value)] = index
    return last


def _materialised(graph: Graph, grouping: Grouping, value: int) -> bool:
    home = grouping.home.get(value)
    if graph.producers.get(value) in grouping.controls:
        return True
    readers = (graph.nodes[r] for r in graph.consumers.get(value, ()))
    return home is not None and any(grouping.bundle_of(reader) != home for reader in readers)


def _last_reader(graph: Graph, placements: Sequence[Placement], move: Move, index: int) -> int:
    last = index
    for reader in graph.consumers.get(move.value, ()):
        node = graph.nodes[reader]
        wants = (s for v, s in zip(node.inputs, placements[reader].operands, strict=True) if v == move.value)
        if reader > last and move.after in wants:
            last = reader
    return last
