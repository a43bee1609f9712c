"""The meshes that a program is planned over: those of a `shard_map` are as its user and the planner want them."""

import pytest

from passes.cluster import Mesh, parse_cluster
from passes.errors import PlanningError
from passes.intra_op.meshes import allowed
from passes.ir import Graph, Node, TensorType

CLUSTER = parse_cluster("8:a100-80g")
ROWS = TensorType(shape=(8,), dtype="float32")


def mapped(axes: dict[str, int]) -> Graph:
    """A program that is one `shard_map` over a mesh of these axes."""
    spec = f"[{next(iter(axes))}]"
    node = Node(
        primitive="shard_map",
        inputs=(0,),
        outputs=(1,),
        params={"mesh": axes, "in_specs": (spec,), "out_specs": (spec,)},
    )
    return Graph(types=(ROWS, ROWS), nodes=(node,), inputs=(0,), outputs=(1,))


def test_a_program_is_planned_on_the_mesh_that_its_shard_map_names_without_what_is_forbidden():
    mesh = Mesh(axes=("x", "y"), sizes=(2, 4), cluster=CLUSTER, forbidden=("all_to_all",))
    (named,) = allowed(mapped({"data": 4, "one": 1, "model": 2}), [mesh])
    assert (named.axes, named.sizes, named.cluster) == (("data", "one", "model"), (4, 1, 2), CLUSTER)
    assert named.forbidden == ("all_to_all",)
    assert named.size == 8


def test_a_mesh_of_another_shape_is_refused():
    with pytest.raises(PlanningError, match=r"a shard_map over the mesh \(data=2\)"):
        allowed(mapped({"data": 2}), [Mesh(axes=("x",), sizes=(8,), cluster=CLUSTER)])
