"""Values that are the same for all microbatches are made in pieces only where all of their readers take pieces."""

from passes.ir import Graph, Node, TensorType
from passes.rules import rule_of
from passes.sharding import parse_spec, replicated
from passes.transforms.batch_axis import BatchWalk
from passes.transforms.batch_demand import sink
from passes.transforms.time_axis import AXIS, Time

ROWS = 8


def masked() -> Graph:
    """A batch times a mask, which is the sine of an array broadcast over the batch, times a weight."""
    shapes = ((ROWS, 4), (4,), (ROWS, 4), (ROWS, 4), (ROWS, 4), (ROWS, 4), (ROWS, 4))
    spread = {"shape": (ROWS, 4), "broadcast_dimensions": (1,), "sharding": None}
    nodes = (
        Node(primitive="broadcast_in_dim", inputs=(1,), outputs=(3,), params=spread),
        Node(primitive="sin", inputs=(3,), outputs=(4,)),
        Node(primitive="mul", inputs=(0, 4), outputs=(5,)),
        Node(primitive="cos", inputs=(2,), outputs=(6,)),
    )
    types = tuple(TensorType(shape=shape, dtype="float32") for shape in shapes)
    return Graph(types=types, nodes=nodes, inputs=(0, 1, 2), outputs=(5, 6))


def test_a_mask_over_the_batch_is_made_a_microbatch_at_a_time() -> None:
    graph, pieces = masked(), parse_spec(f"[{AXIS}, -]")
    walk = BatchWalk(graph, Time(4), {i: rule_of(node, graph) for i, node in enumerate(graph.nodes)}, "exact")
    walk.run([pieces, replicated(1), replicated(2)], {0})
    assert not walk.placements.keys() & {0, 1, 3}
    sink(walk)
    assert walk.placements[0].operands == (replicated(1),)
    assert walk.placements[0].results == walk.placements[1].operands == walk.placements[1].results == (pieces,)
    assert walk.placements[2].operands == (pieces, pieces)
    assert 3 not in walk.placements  # nobody wants it in pieces
    assert walk.home[4] == pieces
    assert walk.home[6] == replicated(2)
