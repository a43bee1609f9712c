"""The stages of backward operators."""

from __future__ import annotations

from passes.ir import Graph, Node, TensorType
from passes.transforms.stage_assignment import StageAssignment


def test_a_number_that_the_first_stage_reads_takes_no_gradient_there() -> None:
    """A gradient of the last stage is divided by what the first one multiplies with, which is everywhere."""
    array, number = TensorType(shape=(8,), dtype="float32"), TensorType(shape=(), dtype="float32")
    nodes = (
        Node(primitive="mul", inputs=(0, 1), outputs=(2,)),
        Node(primitive="sin", inputs=(2,), outputs=(3,)),
        Node(primitive="neg", inputs=(3,), outputs=(4,)),
        Node(primitive="div", inputs=(4, 1), outputs=(5,)),
    )
    types = (array, number, array, array, array, array)
    body = Graph(types=types, nodes=nodes, inputs=(0,), outputs=(5,), constants=(), literals={1: 4.0})
    assigned = StageAssignment(body=body, firsts=(0, 1), late={2, 3}, anywhere=frozenset())
    assert assigned.stage == {0: 0, 1: 1, 2: 1, 3: 1}
