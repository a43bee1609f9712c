"""Programs and the types of their values."""

import jax
import pytest

from passes.ir import Graph, Node, TensorType, item_nbytes


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_have_the_bytes_of_their_words(generator):
    keys = jax.random.key(0, impl=generator)
    assert item_nbytes(str(keys.dtype)) == jax.random.key_data(keys).nbytes


def test_an_input_that_is_returned_keeps_both_names():
    type = TensorType(shape=(), dtype="float32")
    node = Node(primitive="tanh", inputs=(0,), outputs=(1,), params={})
    graph = Graph(
        types=(type, type),
        nodes=(node,),
        inputs=(0,),
        outputs=(0, 1),
        input_names=("x",),
        output_names=("out[0]", "out[1]"),
    )
    part = graph.part([0], [0], [0, 1])
    assert part.input_names == ("x",)
    assert part.output_names == ("out[0]", "out[1]")


def test_outputs_are_named_where_inputs_are_not():
    type = TensorType(shape=(), dtype="float32")
    node = Node(primitive="tanh", inputs=(0,), outputs=(1,), params={})
    graph = Graph(types=(type, type), nodes=(node,), inputs=(0,), outputs=(1,), output_names=("loss",))
    assert graph.part([0], [0], [1]).output_names == ("loss",)
