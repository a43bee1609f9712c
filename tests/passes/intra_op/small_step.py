"""A small training step with its mesh and a placement of all its values whole, for tests of problems and of memory."""

from __future__ import annotations

from passes.cluster import Mesh, parse_cluster
from passes.ir import Graph, Node, TensorType
from passes.placement import Layout, Placement, group
from passes.sharding import Resharder, replicated

CLUSTER = parse_cluster("8:a100-80g")
MESH = Mesh(axes=("x", "y"), sizes=(4, 2), cluster=CLUSTER)
FORWARD, BACKWARD = "jvp(net)", "transpose(jvp(net))"
STATE = ((0, 0), (1, 1))
W, M, X = range(3)


def step(rows: int = 8) -> Graph:
    """A product with a weight, its gradient, and an update with momentum."""
    shapes = ((16, 32), (16, 32), (rows, 16), (rows, 32), (16, 32), (16, 32), (16, 32), ())
    nodes = (
        Node(primitive="dot_general", inputs=(X, W), outputs=(3,), params=contracting(1, 0), scope=FORWARD),
        Node(primitive="reduce_sum", inputs=(3,), outputs=(7,), params={"axes": (0, 1)}, scope=FORWARD),
        Node(primitive="dot_general", inputs=(X, 3), outputs=(4,), params=contracting(0, 0), scope=BACKWARD),
        Node(primitive="add", inputs=(M, 4), outputs=(5,)),
        Node(primitive="sub", inputs=(W, 5), outputs=(6,)),
    )
    types = tuple(TensorType(shape=shape, dtype="float32") for shape in shapes)
    return Graph(types=types, nodes=nodes, inputs=(W, M, X), outputs=(6, 5, 7))


def contracting(left: int, right: int) -> dict[str, object]:
    return {"dimension_numbers": (((left,), (right,)), ((), ()))}


GRAPH = step()
GROUPING = group(GRAPH)
RESHARDER = Resharder(MESH)


def whole() -> Layout:
    ranks = [len(t.shape) for t in GRAPH.types]
    return Layout(
        inputs=tuple(replicated(ranks[v]) for v in GRAPH.inputs),
        placements=tuple(
            Placement(
                operands=tuple(replicated(ranks[v]) for v in node.inputs),
                results=tuple(replicated(ranks[v]) for v in node.outputs),
            )
            for node in GRAPH.nodes
        ),
        outputs=tuple(replicated(ranks[v]) for v in GRAPH.outputs),
    )
