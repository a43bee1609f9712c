"""A buffer is reported by the array in it, with the cause that phases of its makers and readers give."""

from __future__ import annotations

import pytest

from passes.ir import Graph, Node, TensorType
from passes.memory.buffer_origins import Made, Origins, holder_of
from passes.memory.liveness import Buffer
from passes.memory.operations import Kind, Operation
from passes.memory.packing import Span

TYPE = TensorType(shape=(4,), dtype="float32")
FORWARD, BACKWARD, APPLY = "jvp(Block_1)", "transpose(jvp(Block_1))", ""


def node(value: int, scope: str, *inputs: int) -> Node:
    return Node(primitive="sin", inputs=inputs, outputs=(value,), source="net.py:7", scope=scope)


GRAPH = Graph(
    types=(TYPE,) * 4,
    inputs=(0,),
    outputs=(3,),
    nodes=(node(1, FORWARD, 0), node(2, BACKWARD, 1), node(3, APPLY, 2)),
    input_names=("rows",),
)


def operation(at: int, kind: Kind = "elementwise") -> Operation:
    """What node `at` computes, or the input where it is -1."""
    return Operation(kind=kind, operands=(), shape=(4,), dtype="float32", node=at, value=at + 1)


OPERATIONS = (operation(-1, "input"), operation(0), operation(1), operation(2))


@pytest.mark.parametrize(
    ("written", "readers", "cause"),
    [
        (1, {1: [2]}, "saved for backward"),
        (1, {1: [1]}, "transients"),
        (2, {2: [3]}, "gradients"),
        (2, {2: [2]}, "transients"),
        (1, None, "collective buffers"),
    ],
)
def test_causes_follow_from_the_phases_of_makers_and_readers(
    written: int, readers: dict[int, list[int]] | None, cause: str
) -> None:
    buffer = Buffer(operations=(written,), nbytes=16, first=0, last=1)
    holder = holder_of(Span(16, 0, 1, Made(Origins(GRAPH), OPERATIONS, buffer, readers)))
    assert (holder.cause, holder.nbytes, holder.name) == (cause, 16, "sin at net.py:7")


def test_inputs_and_results_of_collectives_are_told_apart() -> None:
    origins = Origins(GRAPH)
    operations = (operation(-1, "input"), operation(0, "collective"))
    sent = Buffer(operations=(1,), nbytes=16, first=0, last=1)
    assert holder_of(Span(16, 0, 1, Made(origins, operations, sent, {}))).cause == "collective buffers"
    copied = Buffer(operations=(0,), nbytes=16, first=0, last=1)
    assert holder_of(Span(16, 0, 1, Made(origins, operations, copied, {}))).name == "rows"
