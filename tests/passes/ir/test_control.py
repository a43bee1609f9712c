"""Loops and branches as planning reads them: ports, their uses and trips; and which nodes have effects."""

from dataclasses import replace

import pytest

from passes.ir import Graph, Node, TensorType
from passes.ir.control import Scan, control_of, scan_of
from passes.ir.effects import CALLBACKS, EFFECTFUL, has_effect, is_ordered

ROW, STACK, NUMBER = (TensorType(shape=shape, dtype="float32") for shape in ((4,), (3, 4), ()))
LOOP = Scan(constants=1, carries=1, length=3)


def body(*more: Node) -> Graph:
    """Of a constant, a carry and a slice: a new carry and a row."""
    nodes = (
        Node(primitive="mul", inputs=(0, 2), outputs=(3,)),
        Node(primitive="add", inputs=(1, 3), outputs=(4,)),
        *more,
    )
    return Graph(types=(ROW, ROW, ROW, ROW, ROW), nodes=nodes, inputs=(0, 1, 2), outputs=(4, 3))


def looped(inner: Graph) -> Graph:
    node = LOOP.node(inner, (0, 1, 2), (3, 4), source="a.py:1", scope="loop")
    return Graph(types=(ROW, ROW, STACK, ROW, STACK), nodes=(node,), inputs=(0, 1, 2), outputs=(3, 4))


def test_a_loop_that_is_written_is_read_again() -> None:
    graph = looped(body())
    graph.verify()
    assert scan_of(graph.nodes[0]) == LOOP
    assert LOOP.fixed == 2
    assert scan_of(Node(primitive="add", inputs=(0, 1), outputs=(2,))) is None


def test_values_at_one_port_of_a_loop_are_of_its_type() -> None:
    control = control_of((graph := looped(body())).nodes[0], graph)
    assert control is not None
    (inner,) = control.bodies
    assert inner.trips == LOOP.length
    assert [control.ports[port_use.port].carry for port_use in control.operands] == [False, True, False]
    assert [port_use.stacked for port_use in control.operands] == [False, False, True]
    assert [port_use.stacked for port_use in control.results] == [False, True]
    assert control.operands[1].port == control.results[0].port == inner.inputs[1] == inner.outputs[0]
    for port_use, value in zip(control.operands, graph.nodes[0].inputs, strict=True):
        of_port = control.ports[port_use.port].type
        assert graph.types[value].shape == ((LOOP.length, *of_port.shape) if port_use.stacked else of_port.shape)


def test_an_ordinary_operator_has_no_control_flow() -> None:
    graph = body()
    assert [control_of(node, graph) for node in graph.nodes] == [None, None]


@pytest.mark.parametrize("primitive", sorted(CALLBACKS))
def test_an_effect_in_a_body_is_the_loops(primitive: str) -> None:
    call = Node(primitive=primitive, inputs=(3,), outputs=(), params={"ordered": True})
    node = looped(body(call)).nodes[0]
    assert has_effect(node) == has_effect(call) == (primitive in EFFECTFUL)
    assert is_ordered(node) == is_ordered(call) == (primitive in EFFECTFUL)
    assert not is_ordered(replace(call, params={"ordered": False}))
    assert not has_effect(looped(body()).nodes[0])
