"""Buffers that GPU loops fill: one kernel makes all of a shape, and loops list them before what they only read."""

from __future__ import annotations

from passes.memory.gpu_rooms import at_once
from passes.memory.operations import Operation
from tests.passes.memory.device_programs import ROWS, TABLE, operation


def two_loops(*, start: float = 0.0) -> list[Operation]:
    """A loop that stacks a table, and one that stacks another and sums rows, each with what it reads."""
    return [
        operation("input", shape=ROWS, tag=0),
        operation("literal", shape=(), tag=("float", start)),
        operation("broadcast", 1, shape=ROWS, tag=()),
        operation("fresh", shape=TABLE, tag=(0, 0)),
        operation("loop", 0, 3, shape=(0,), tag=0),
        operation("part", 3, 4, shape=TABLE, tag=(0, 0)),
        operation("fresh", shape=TABLE, tag=(1, 0)),
        operation("carry", 2, shape=ROWS, tag=(1, 1)),
        operation("carry", 2, shape=ROWS, tag=(1, 2)),
        operation("loop", 5, 7, 8, 6, shape=(0,), tag=1),
    ]


def test_rooms_of_one_shape_are_results_of_one_kernel_for_all_loops() -> None:
    changed, place = at_once(two_loops())
    first, second = changed[place[3]], changed[place[6]]
    assert first.kind == second.kind == "result"
    assert first.operands == second.operands
    sums = [changed[changed[place[carry]].operands[0]] for carry in (7, 8)]
    assert {made.kind for made in sums} == {"result"}
    assert sums[0].operands == sums[1].operands != first.operands


def test_a_loops_carries_come_before_its_rooms() -> None:
    changed, place = at_once(two_loops())
    assert changed[place[9]].operands == tuple(place[o] for o in (7, 8, 6, 5))


def test_a_sum_that_begins_with_something_else_has_a_room_of_its_own() -> None:
    changed, place = at_once(two_loops(start=1.0))
    assert [changed[place[carry]].operands for carry in (7, 8)] == [(place[2],)] * 2


def test_a_room_of_another_shape_is_made_alone() -> None:
    every = two_loops()[:5]
    changed, place = at_once(every)
    assert changed[place[3]] == every[3]
