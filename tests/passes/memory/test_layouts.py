"""Layouts of reduced windows: that in which a collective sends the result, where nothing else reads it."""

from __future__ import annotations

import pytest

from passes.memory.layouts import laid_out
from passes.memory.operations import Operation
from tests.passes.memory.device_programs import operation

ORDER = (1, 0)
WIDE, NARROW = (8, 6), (4, 6)


def pooled(name: str, *others: Operation) -> list[Operation]:
    """A reduction over windows that is gathered along its last dimension, and operations beside it."""
    return [
        operation("input", shape=WIDE, tag=0),
        operation("opaque", 0, shape=NARROW, name=name),
        operation("transpose", 1, shape=NARROW[::-1], tag=ORDER),
        operation("collective", 2, shape=(12, 4), name="all_gather"),
        *others,
    ]


def test_the_operand_of_a_reduction_is_transposed_in_place_of_its_result():
    changed, place = laid_out(pooled("reduce-window-max"))
    gathered = changed[place[3]]
    reduced = changed[gathered.operands[0]]
    source = changed[reduced.operands[0]]
    assert (reduced.name, reduced.shape) == ("reduce-window-max", NARROW[::-1])
    assert (source.kind, source.tag, source.shape, source.operands) == ("transpose", ORDER, WIDE[::-1], (place[0],))


@pytest.mark.parametrize(
    "operations",
    [pooled("reduce-window-max", operation("elementwise", 1, shape=NARROW, name="negate")), pooled("convolution")],
    ids=["another reader", "another operation"],
)
def test_results_with_another_reader_or_of_another_operation_are_transposed_themselves(operations: list[Operation]):
    assert laid_out(operations) == (tuple(operations), tuple(range(len(operations))))
