"""The copies that XLA:TPU makes where kernels want another layout, by what libtpu 0.0.42 made of small models."""

from __future__ import annotations

import pytest

from passes.memory.operations import Operation
from passes.memory.tpu_copies import copied
from passes.memory.tpu_layouts import stored
from tests.passes.memory.device_programs import drawn, narrow, operation

IMAGES = {(8, 64, 64, 3): 4194304, (8, 32, 32, 3): 1048576}
"""Shapes of images in bfloat16 -> bytes of the copy that a convolution reads, of AlexNet and of Wide-ResNet on v5p."""


@pytest.mark.parametrize("shape", IMAGES)
def test_convolutions_read_a_copy_of_images_that_lie_otherwise(shape: tuple[int, ...]) -> None:
    batch, rows, columns, colors = shape
    every = (
        narrow("input", shape=shape, name="images"),
        narrow("input", shape=(3, 3, colors, 128), name="weights"),
        narrow("opaque", 0, 1, shape=(batch, rows, columns, 128), name="convolution"),
        narrow("transpose", 0, shape=(colors, rows, columns, batch)),
        narrow("opaque", 3, 2, shape=(colors, 3, 3, 128), name="convolution"),
        narrow("opaque", 2, 1, shape=(batch, rows, columns, 128), name="convolution"),
    )
    made, place = copied(every, (4, 5))
    (copy,) = [index for index, held in enumerate(made) if held.name == "copy"]
    assert stored(made[copy]) == IMAGES[shape] > stored(every[0])
    assert made[copy].operands == (place[0],)
    assert made[place[2]].operands == (copy, place[1])
    assert made[place[4]].operands == (copy, place[2])
    assert made[place[5]].operands == (place[2], place[1])


def test_images_that_are_rounded_are_copied_as_they_are_rounded() -> None:
    every = (
        operation("input", shape=(8, 64, 64, 3), name="images"),
        narrow("expensive", 0, shape=(8, 64, 64, 3), name="convert float32"),
        narrow("input", shape=(3, 3, 3, 128), name="weights"),
        narrow("opaque", 1, 2, shape=(8, 64, 64, 128), name="convolution"),
    )
    made, place = copied(every, (3,))
    (copy,) = [index for index, held in enumerate(made) if held.name == "copy"]
    assert stored(made[copy]) == IMAGES[8, 64, 64, 3]
    assert made[copy].operands == (place[1],)


def scattered(width: int) -> tuple[Operation, ...]:
    """An embedding of rows so wide: looked up, its gradient scattered, and added to it."""
    table, rows = (4096, width), (64, width)
    return (
        operation("input", shape=table, name="table"),
        operation("input", shape=(64, 1), name="places"),
        operation("gather", 0, 1, shape=rows),
        operation("literal", shape=(), tag=("float", 0.0)),
        operation("broadcast", 3, shape=table, tag=()),
        operation("update", 4, 1, 2, shape=table, name="scatter-add"),
        operation("elementwise", 0, 5, shape=table, name="add"),
    )


@pytest.mark.parametrize("width", [32, 64])
def test_what_is_scattered_in_rows_is_updated_in_rows_and_copied_back(width: int) -> None:
    """As of DLRM, f32[32768,64] and its momentum in rows of 128, and of sums of looked-up rows, f32[20000,32]."""
    every = scattered(width)
    made, place = copied(every, (6,))
    assert stored(made[place[5]]) == 128 // width * stored(every[5])
    result = made[place[6]]
    assert (result.name, result.shape) == ("copy", (4096, width))
    (added,) = result.operands
    assert made[added].shape == (4096, 128)
    (table, gradient) = made[added].operands
    assert gradient == place[5]
    assert (made[table].name, made[table].operands) == ("copy", (place[0],))
    assert made[place[2]].operands[0] == table


def test_rows_of_few_numbers_are_copied_back_once_they_are_scattered() -> None:
    """As of DLRM's tables cut by columns: bf16[32768,16] takes 8 times as much in rows."""
    every = scattered(16)
    made, place = copied(every, (6,))
    back = made[place[5]]
    assert (back.name, back.shape) == ("copy", (4096, 16))
    assert made[back.operands[0]].shape == (4096, 128)
    assert made[place[6]].operands == (place[0], place[5])


def test_whole_rows_stay_as_they_are() -> None:
    every = scattered(128)
    assert copied(every, (6,)) == (every, tuple(range(len(every))))


@pytest.mark.parametrize("seed", range(50))
def test_every_program_keeps_its_operations_in_a_valid_order(seed: int) -> None:
    program = drawn(seed)
    made, place = copied(program.operations, program.outputs)
    assert all(o < index for index, held in enumerate(made) for o in held.operands)
    kept = zip(program.operations, place, strict=True)
    assert all(made[new].shape == old.shape and made[new].dtype == old.dtype for old, new in kept)
