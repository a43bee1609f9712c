"""Sums over microbatches are taken before later operators where that adds up no more elements."""

from dataclasses import replace

import pytest

from passes.ir import Graph, Node, TensorType
from passes.rules import rule_of
from passes.sharding import parse_spec, replicated
from passes.transforms.batch_axis import BatchWalk
from passes.transforms.late_sums import made_of_sums
from passes.transforms.time_axis import AXIS, Time

ROWS, WIDTH = 8, 4


def normalised(dtype: str = "float32") -> Graph:
    """A sum of rows times the sine of a parameter, as the gradient of what the parameter is made into; summed again."""
    nodes = (
        Node(primitive="sin", inputs=(1,), outputs=(2,)),
        Node(primitive="reduce_sum", inputs=(0,), outputs=(3,), params={"axes": (0,)}),
        Node(primitive="neg", inputs=(3,), outputs=(4,)),
        Node(primitive="mul", inputs=(4, 2), outputs=(5,)),
        Node(primitive="convert_element_type", inputs=(5,), outputs=(6,), params={"new_dtype": dtype}),
    )
    shapes = ((ROWS, WIDTH), *((WIDTH,),) * 5)
    types = (*(TensorType(shape=shape, dtype="float32") for shape in shapes), TensorType(shape=(WIDTH,), dtype=dtype))
    backward = tuple(replace(node, scope="transpose(jvp())") for node in nodes)
    return Graph(types=types, nodes=backward, inputs=(0, 1), outputs=(6,))


def walked(graph: Graph) -> BatchWalk:
    walk = BatchWalk(graph, Time(4), {i: rule_of(node, graph) for i, node in enumerate(graph.nodes)}, "exact")
    walk.run([parse_spec(f"[{AXIS}, -]"), replicated(1)], {0})
    return walk


def test_readers_of_a_sum_alone_wait_for_all_of_it() -> None:
    assert made_of_sums(walked(normalised())) == {2, 3, 4}


def test_sums_are_added_up_in_the_wider_dtype() -> None:
    assert not made_of_sums(walked(normalised("float64")))


def test_readers_that_shrink_a_sum_wait_with_those_that_do_not() -> None:
    """The sum is added up for one reader, and costs nothing for the other."""
    graph = normalised()
    dot = Node(primitive="mul", inputs=(3, 2), outputs=(7,), scope="transpose(jvp())")
    summed = Node(primitive="reduce_sum", inputs=(7,), outputs=(8,), params={"axes": (0,)}, scope="transpose(jvp())")
    types = (*graph.types, graph.types[5], TensorType(shape=(), dtype="float32"))
    graph = replace(graph, types=types, nodes=(*graph.nodes, dot, summed), outputs=(6, 8))
    assert made_of_sums(walked(graph)) == {2, 3, 4, 5, 6}


@pytest.mark.parametrize("outputs", [(6, 7), (7,)], ids=["no more bytes", "fewer bytes"])
def test_readers_that_shrink_a_sum_stay_in_the_microbatch(outputs: tuple[int, ...]) -> None:
    graph = normalised()
    summed = Node(primitive="reduce_sum", inputs=(6,), outputs=(7,), params={"axes": (0,)}, scope="transpose(jvp())")
    types = (*graph.types, TensorType(shape=(), dtype="float32"))
    graph = replace(graph, types=types, nodes=(*graph.nodes, summed), outputs=outputs)
    assert bool(made_of_sums(walked(graph))) == (6 in outputs)
