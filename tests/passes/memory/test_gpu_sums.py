"""Sums of long columns on GPUs: in two steps, and converted where they are made."""

from __future__ import annotations

import math

import pytest

from passes.memory.gpu_sums import in_parts
from passes.memory.operations import Operation, Shape
from tests.passes.memory.device_programs import narrow, operation


def summed(shape: Shape, added: Shape, made: Shape) -> list[Operation]:
    return [narrow("input", shape=shape, tag=0), narrow("reduce", 0, shape=made, tag=("reduce-sum", added))]


@pytest.mark.parametrize(
    ("shape", "added", "made", "parts"),
    [
        ((8, 1024, 256), (0, 1), (256,), (1, 64, 256)),
        ((2, 8192, 64), (1,), (2, 64), (2, 64, 64)),
        ((4, 1024, 256), (0, 1), (256,), None),
        ((256, 8192), (1,), (256,), None),
        ((8192, 4, 1024), (0, 2), (4,), None),
    ],
)
def test_long_columns_are_added_in_parts(shape: Shape, added: Shape, made: Shape, parts: Shape | None) -> None:
    every = summed(shape, added, made)
    changed, place = in_parts(every, (1,))
    if parts is None:
        assert changed == every
        return
    _, view, first, last = changed
    assert place == [0, 3]
    assert (view.kind, view.size) == ("bitcast", every[0].size)
    assert (first.shape, last.shape) == (parts, made)
    assert math.prod(view.shape[:2]) == math.prod(parts[:2])


@pytest.mark.parametrize("is_output", [True, False])
def test_what_a_sum_is_converted_to_is_written_by_its_kernel(is_output: bool) -> None:
    every = [
        *summed((8, 1024, 256), (0, 1), (256,)),
        operation("elementwise", 1, shape=(256,), name="convert bfloat16"),
    ]
    changed, place = in_parts(every, (1, 2) if is_output else (2,))
    assert changed[place[1]].dtype == ("bfloat16" if is_output else "float32")
    assert changed[place[2]].kind == ("elementwise" if is_output else "bitcast")
