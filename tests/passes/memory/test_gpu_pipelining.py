"""Loops on GPUs send what they only stack in the next iteration: what is carried on, and what is not."""

from __future__ import annotations

import pytest

from passes.memory.gpu_pipelining import carried_on
from passes.memory.operations import Kind, Operation
from tests.passes.memory.device_programs import ROWS, TABLE, operation

SCATTER = ("reduce_scatter", ("x",), "add", -1, 0)
LAYERS_STACK = 0
"""The output that is stacked."""


def body(*between: Kind, tag: tuple[object, ...] = SCATTER) -> list[Operation]:
    """A gradient that is transposed, sent, changed by more operations, and stacked."""
    every = [
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE),
        operation("transpose", 1, shape=TABLE[::-1], tag=(1, 0)),
        operation("collective", 2, shape=ROWS, tag=tag),
    ]
    for kind in between:
        every.append(operation(kind, len(every) - 1, name="convert bfloat16"))
    return [*every, operation("update", len(every) - 1, shape=(0,), tag=("stack", LAYERS_STACK))]


@pytest.mark.parametrize("between", [(), ("elementwise",), ("bitcast", "elementwise")])
def test_a_gradient_is_carried_to_the_iteration_that_sends_it(between: tuple[Kind, ...]) -> None:
    every = body(*between)
    (entered, *changed, end), outputs = carried_on(every, [len(every) - 1], [LAYERS_STACK])
    assert outputs == [LAYERS_STACK]
    assert (end.kind, end.operands, end.shape) == ("opaque", (2,), (0,))
    assert changed[1] == every[1].reading((1, 1))
    assert (entered.kind, entered.operands, entered.shape) == ("input", (), TABLE)
    assert changed[2].operands == (0,)  # it is brought into the order in which it is sent in that iteration, too
    assert [o.kind for o in changed] == [o.kind for o in every]


@pytest.mark.parametrize(
    "every",
    [
        body(tag=("all_reduce", ("x",), "add", -1, -1)),
        body("reduce"),
        [*body()[:-1], operation("elementwise", 3, 3), operation("update", 4, shape=(0,), tag=("stack", LAYERS_STACK))],
    ],
    ids=("summed", "computed from", "read twice"),
)
def test_what_is_summed_or_not_only_stacked_is_sent_at_once(every: list[Operation]) -> None:
    assert carried_on(every, [len(every) - 1], [LAYERS_STACK]) == (every, [])


def test_what_leaves_the_loop_as_it_is_received_is_sent_at_once() -> None:
    every = body()
    assert carried_on(every, [len(every) - 1, 3], [LAYERS_STACK]) == (every, [])


def test_an_argument_is_sent_at_once() -> None:
    every = [
        operation("input", shape=TABLE, tag=0),
        operation("collective", 0, tag=SCATTER),
        operation("update", 1, shape=(0,), tag=("stack", LAYERS_STACK)),
    ]
    assert carried_on(every, [2], [LAYERS_STACK]) == (every, [])
