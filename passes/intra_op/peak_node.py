"""The node at which a plan has most live bytes, in the order of the program, for which a memory row is stated.

Nodes run in the order in which the program was traced, and values that leave their operator group are live: both can be
said in a row. What a compiler makes of the same plan is in `passes.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from passes.cluster import Mesh
from passes.ir import Graph
from passes.placement import Grouping, Layout, Placement, Resharding, ReshardingPlan

NodePath = tuple[tuple[int, int], ...]
"""The path of a node: (node, which of its bodies) for each loop or branch that it is in, outermost first, then (node,
-1).
"""


def peak_node(graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, reshardings: ReshardingPlan) -> NodePath:
    """The path of the node with the most live bytes, which may be inside loops and branches."""
    return _peak_node(graph, grouping, mesh, layout, reshardings)[1]


def _peak_node(
    graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, reshardings: ReshardingPlan
) -> tuple[int, NodePath]:
    """The most bytes that are live after any node, and that node; a loop or branch adds the most of its
    largest body.
    """
    last = _last_use(graph, grouping)
    change = [0] * (len(graph.nodes) + 2)
    paths: dict[int, NodePath] = {}
    for index, (node, placement) in enumerate(zip(graph.nodes, layout.placements, strict=True)):
        for value, spec in zip(node.outputs, placement.results, strict=True):
            end = last.get(value, index)
            if _materialised(graph, grouping, value):
                nbytes = spec.local_nbytes(graph.types[value], mesh)
                change[index] += nbytes
                change[end + 1] -= nbytes
        for move in reshardings.before[index]:
            nbytes = move.after.local_nbytes(graph.types[move.value], mesh)
            change[index] += nbytes
            change[_last_reader(graph, layout.placements, move, index) + 1] -= nbytes
        if index in reshardings.bodies:
            inside, paths[index] = _inside(grouping, index, mesh, placement, reshardings)
            change[index] += inside
            change[index + 1] -= inside
    live = list(accumulate(change))
    at = min(max(range(len(live)), key=live.__getitem__), len(graph.nodes) - 1)
    return max(live), paths.get(at, ((at, -1),))


def _inside(
    grouping: Grouping, index: int, mesh: Mesh, placement: Placement, reshardings: ReshardingPlan
) -> tuple[int, NodePath]:
    """The most bytes that are live in the largest body of a control node, and the node there."""
    bodies = zip(
        grouping.controls[index].bodies,
        grouping.bodies[index],
        placement.bodies,
        reshardings.bodies[index],
        strict=True,
    )
    peaks = [_peak_node(body.graph, inner, mesh, layouts, moves) for body, inner, layouts, moves in bodies]
    largest = max(range(len(peaks)), key=lambda number: peaks[number][0])
    nbytes, path = peaks[largest]
    return nbytes, ((index, largest), *path)


def _last_use(graph: Graph, grouping: Grouping) -> Mapping[int, int]:
    """The last node that reads each value, aliases included."""
    last: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            last[value] = last[grouping.roots.get(value, value)] = index
    return last


def _materialised(graph: Graph, grouping: Grouping, value: int) -> bool:
    """Whether a value is written to memory: a loop or branch makes it, or it is read outside of its operator group."""
    home = grouping.home.get(value)
    if graph.producers.get(value) in grouping.controls:
        return True
    readers = (graph.nodes[r] for r in graph.consumers.get(value, ()))
    return home is not None and any(grouping.operator_group_of(reader) != home for reader in readers)


def _last_reader(graph: Graph, placements: Sequence[Placement], move: Resharding, index: int) -> int:
    """The last node that reads what a value is brought to before node `index`."""
    last = index
    for reader in graph.consumers.get(move.value, ()):
        node = graph.nodes[reader]
        wants = (s for v, s in zip(node.inputs, placements[reader].operands, strict=True) if v == move.value)
        if reader > last and move.after in wants:
            last = reader
    return last
