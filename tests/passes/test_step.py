"""Steps as planners take them."""

from passes.ir import Graph, TensorType
from passes.step import FusedStep, Step


def test_a_fused_step_knows_where_its_rows_are() -> None:
    graph = Graph(types=(TensorType(shape=(2, 8), dtype="float32"),), nodes=(), inputs=(0,), outputs=(0,))
    assert FusedStep.of(Step(graph=graph, rows={0: 1})).rows == {0: 1}
