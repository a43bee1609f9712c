"""The stages of backward operators."""

from __future__ import annotations

from dataclasses import replace

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


def test_a_weights_gradient_is_where_the_weight_is_read() -> None:
    """A residual block is cut at its middle: what its first weight multiplies is read by the stage behind as well."""
    sizes = ((32, 8), (8, 16), (16, 8), (32, 16), (32, 8), (32, 8), (32, 16), (8, 16), (32, 8))
    product = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    of_rows = {"dimension_numbers": (((0,), (0,)), ((), ()))}
    of_columns = {"dimension_numbers": (((1,), (1,)), ((), ()))}
    nodes = (
        Node(primitive="dot_general", inputs=(0, 1), outputs=(3,), params=product),  # x @ inner
        Node(primitive="dot_general", inputs=(3, 2), outputs=(4,), params=product),  # h @ outer
        Node(primitive="add", inputs=(0, 4), outputs=(5,)),  # x + h @ outer
        Node(primitive="dot_general", inputs=(5, 2), outputs=(6,), params=of_columns),  # the gradient of h
        Node(primitive="dot_general", inputs=(0, 6), outputs=(7,), params=of_rows),  # of inner
        Node(primitive="dot_general", inputs=(6, 1), outputs=(8,), params=of_columns),  # of x
    )
    types = tuple(TensorType(shape=shape, dtype="float32") for shape in sizes)
    body = Graph(types=types, nodes=nodes, inputs=(0, 1, 2), outputs=(7, 8), constants=(), literals={})
    assigned = StageAssignment(body=body, firsts=(0, 1), late={3, 4, 5}, anywhere=frozenset())
    assert assigned.stage == {0: 0, 1: 1, 2: 1, 3: 1, 4: 0, 5: 0}


def test_what_the_stage_before_makes_of_a_cotangent_that_it_is_sent_is_not_sent_as_well() -> None:
    """A residual stream in float32 whose branch computes in bfloat16: its cotangent is the stream's, rounded."""
    wide, narrow = TensorType(shape=(8,), dtype="float32"), TensorType(shape=(8,), dtype="bfloat16")
    x, weight, branch, stream, end, cotangent, rounded, of_branch, of_stream = range(9)
    nodes = (
        Node(primitive="mul", inputs=(x, weight), outputs=(branch,), scope="jvp(f)/a"),
        Node(primitive="sin", inputs=(branch,), outputs=(stream,), scope="jvp(f)/a"),
        Node(primitive="sin", inputs=(stream,), outputs=(end,), scope="jvp(f)/b"),
        Node(primitive="cos", inputs=(end,), outputs=(cotangent,), scope="transpose(jvp(f))/b"),
        Node(primitive="convert_element_type", inputs=(cotangent,), outputs=(rounded,), scope="transpose(jvp(f))"),
        Node(primitive="mul", inputs=(rounded, weight), outputs=(of_branch,), scope="transpose(jvp(f))/a"),
        Node(primitive="mul", inputs=(cotangent, stream), outputs=(of_stream,), scope="transpose(jvp(f))/a"),
    )
    types = (narrow, narrow, narrow, wide, wide, wide, narrow, narrow, wide)
    body = Graph(types=types, nodes=nodes, inputs=(x, weight), outputs=(of_branch, of_stream))
    alone = replace(body, nodes=nodes[:-1], outputs=(of_branch,))
    late = set(range(3, 7))
    assigned = StageAssignment(body=body, firsts=(0, 2), late=late, anywhere=frozenset())
    assert [assigned.stage[i] for i in range(7)] == [0, 0, 1, 1, 0, 0, 0]
    assert assigned.made[rounded] == 0
    # Where the stage is sent nothing else, half the bytes are those of what is rounded.
    assert StageAssignment(body=alone, firsts=(0, 2), late=late, anywhere=frozenset()).stage[4] == 1
