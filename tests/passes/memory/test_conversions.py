"""Slices of widened arrays are taken before widening: on random programs and on the logits of a language model."""

from __future__ import annotations

import pytest

from passes.memory.conversions import sliced_first, widens
from passes.memory.operations import Operation
from tests.passes.memory.device_programs import drawn, operation

LOGITS, SHIFTED = (64, 96), (63, 96)


def logits(*readers: Operation) -> list[Operation]:
    """Logits of bfloat16, widened, of which the last row is left out."""
    return [
        operation("input", shape=LOGITS)._replace(dtype="bfloat16"),
        operation("elementwise", 0, shape=LOGITS, name="convert bfloat16"),
        operation("rearrange", 1, shape=SHIFTED, name="slice"),
        *readers,
    ]


def test_logits_are_sliced_in_their_own_dtype():
    changed = sliced_first(logits(), (2,))
    assert [(o.kind, o.operands, o.shape, o.dtype) for o in changed[1:]] == [
        ("rearrange", (0,), SHIFTED, "bfloat16"),
        ("elementwise", (1,), SHIFTED, "float32"),
    ]
    assert widens(changed, 2)


@pytest.mark.parametrize("outputs", [(2,), (1, 2)])
def test_a_conversion_that_is_read_in_full_is_not_sliced_first(outputs: tuple[int, ...]):
    every = logits(*([operation("reduce", 1)] if outputs == (2,) else []))
    assert sliced_first(every, outputs) == every


def test_a_narrowing_conversion_is_not_sliced_first():
    every = logits()
    every[0] = every[0]._replace(dtype="float64")
    assert sliced_first(every, (2,)) == every


@pytest.mark.parametrize("seed", range(50))
def test_programs_without_conversions_stay_as_they_are(seed: int):
    program = drawn(seed)
    assert sliced_first(program.operations, program.outputs) == list(program.operations)
