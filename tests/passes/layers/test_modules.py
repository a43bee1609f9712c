"""Layers of a forward pass: modules that are numbered, and even parts where none are."""

from __future__ import annotations

from passes.ir import Graph, Node, TensorType
from passes.layers.modules import even_parts, numbered_modules

VECTOR = TensorType(shape=(8,), dtype="float32")


def chain(*scopes: str) -> Graph:
    """One operator after the other, in these scopes."""
    nodes = tuple(Node(primitive="sin", inputs=(i,), outputs=(i + 1,), scope=scope) for i, scope in enumerate(scopes))
    return Graph(types=(VECTOR,) * (len(nodes) + 1), nodes=nodes, inputs=(0,), outputs=(len(nodes),))


def test_layers_are_the_modules_that_are_numbered_and_what_follows_them() -> None:
    graph = chain(
        "jvp(f)/embed", "jvp(f)/Block_0/a", "jvp(f)/Block_0/b", "jvp(f)/Block_1/a", "jvp(f)/head", "jvp(f)/loss"
    )
    assert numbered_modules(graph) == (1, 3, 4)


def test_of_several_kinds_the_most_frequent_counts() -> None:
    graph = chain("jvp(f)/Dense_0", "jvp(f)/Block_0", "jvp(f)/Block_1", "jvp(f)/Block_2", "jvp(f)/Dense_1")
    assert numbered_modules(graph) == (1, 2, 3, 4)


def test_one_module_alone_is_no_layer() -> None:
    assert numbered_modules(chain("jvp(f)/Block_0", "jvp(f)/Block_0", "jvp(f)/loss")) == ()


def test_even_parts_hold_equal_work() -> None:
    assert even_parts(chain(*["jvp(f)"] * 16)) == tuple(range(0, 16, 2))


def test_a_cut_that_more_crosses_is_none() -> None:
    """The second half of the chain carries a value along: only the first half is cut."""
    graph = chain(*["jvp(f)"] * 8)
    last = Node(primitive="add", inputs=(8, 4), outputs=(9,), scope="jvp(f)")
    carried = Graph(types=(VECTOR,) * 10, nodes=(*graph.nodes, last), inputs=(0,), outputs=(9,))
    assert max(even_parts(carried)) <= 4
