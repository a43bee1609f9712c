"""Summands of a cotangent on several stages, and what may be made of each before they are added up."""

from __future__ import annotations

import pytest

from passes.ir import Graph, Node, TensorType
from passes.transforms.late_summands import Made, Summand, summands_of

SQUARE = TensorType(shape=(4, 4), dtype="float32")


def body(primitive: str, *, others: tuple[str, ...] = (), first: bool = True) -> Graph:
    """Two cotangents, added up, and an operator of the sum, which `tanh` reads; others are `zero` or `weight`."""
    weight, left, right, total, made, read, zero = range(7)
    named = {"zero": zero, "weight": weight}
    operands = (*([total] if first else []), *(named[name] for name in others), *([] if first else [total]))
    nodes = [
        Node(primitive="neg", inputs=(weight,), outputs=(left,)),
        Node(primitive="neg", inputs=(weight,), outputs=(right,)),
        Node(primitive="add_any", inputs=(left, right), outputs=(total,)),
        Node(primitive=primitive, inputs=operands, outputs=(made,), params={"permutation": (1, 0)}),
        Node(primitive="tanh", inputs=(made,), outputs=(read,)),
    ]
    types = (*(SQUARE,) * 6, TensorType(shape=(), dtype="float32"))
    return Graph(types=types, nodes=tuple(nodes), inputs=(weight,), outputs=(read,), literals={zero: 0.0})


STAGES = {1: 0, 2: 1, 3: 1, 4: 1, 5: 1}


@pytest.mark.parametrize(
    ("graph", "operand"),
    [
        (body("neg"), 0),
        (body("transpose"), 0),
        (body("mul", others=("weight",)), 0),
        (body("mul", others=("weight",), first=False), 1),
        (body("add", others=("zero",)), 0),
    ],
    ids=["neg", "transpose", "times a weight", "a weight times", "added to zeros"],
)
def test_what_is_linear_is_made_of_each_summand(graph: Graph, operand: int) -> None:
    found = summands_of(graph, STAGES, 4, 4)
    assert found.summands == (Summand(1, (Made(3, operand),)), Summand(2, (Made(3, operand),)))
    assert found.replaced == {2, 3}


@pytest.mark.parametrize(
    "graph",
    [body("tanh"), body("add", others=("weight",)), body("div", others=("weight",), first=False)],
    ids=["tanh", "added to a weight", "divided by"],
)
def test_what_is_not_is_made_of_their_sum(graph: Graph) -> None:
    assert summands_of(graph, STAGES, 4, 4).summands == (Summand(4),)
    assert not summands_of(graph, STAGES, 4, 4).replaced


def test_one_stage_adds_up_its_own() -> None:
    assert summands_of(body("neg"), dict.fromkeys(STAGES, 1), 4, 4).summands == (Summand(4),)
