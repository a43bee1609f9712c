"""Batches of matrices on TPUs, in the tiles that libtpu 0.0.42 gives to the scores of vision transformers."""

from __future__ import annotations

import pytest

from passes.memory.tpu_batches import batches
from passes.memory.tpu_layouts import nbytes, stored
from tests.passes.memory.device_programs import TABLE, operation

WINDOWS = (128, 6, 64, 64)


def test_scores_and_what_is_computed_of_them_lie_in_tiles_of_rows_and_columns() -> None:
    every = (
        operation("input", shape=WINDOWS, tag=0),
        operation("dot", 0, 0, shape=WINDOWS, tag=("merged", 0)),
        operation("elementwise", 1, 0, shape=WINDOWS, name="add"),
        operation("dot", 2, 0, shape=TABLE, tag=("merged", 1)),
    )
    made, place = batches(every, (3,))
    assert place == (0, 1, 2, 3)
    assert [held.is_batch for held in made] == [False, True, True, False]
    assert stored(made[1]) == stored(made[2]) == 4 * 128 * 6 * 64 * 128
    assert stored(made[0]) == nbytes(WINDOWS, "float32") == 4 * 128 * 6 * 64 * 64


@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_are_looked_up_take_whole_tiles(padded: bool) -> None:
    """As f32[196608,16] of a wide and deep model, from a table that may be a copy in whole tiles."""
    every = (
        operation("input", shape=(120000, 128 if padded else 16), tag=0),
        operation("input", shape=(16384, 12, 1), tag=1),
        operation("gather", 0, 1, shape=(16384, 12, 16)),
        operation("gather", 0, 1, shape=(16384, 130)),
    )
    made, _ = batches(every, (2, 3))
    assert [described.is_rows for described in made] == [False, False, True, False]
    assert stored(made[2]) == 4 * 196608 * 128
