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


def test_types_are_of_one_sort_of_numbers_or_of_none():
    sorts = {
        dtype: (type.is_integer, type.is_float, type.is_inexact)
        for dtype in ("float32", "bfloat16", "float8_e4m3fn", "complex64", "uint4", "bool", "float0", "key<fry>")
        if (type := TensorType(shape=(2,), dtype=dtype))
    }
    real, none = (False, True, True), (False, False, False)
    assert sorts == {
        "float32": real,
        "bfloat16": real,
        "float8_e4m3fn": real,
        "complex64": (False, False, True),
        "uint4": (True, False, False),
        "bool": none,
        "float0": none,
        "key<fry>": none,
    }
