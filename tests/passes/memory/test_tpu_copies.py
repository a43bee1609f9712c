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


def scattered(width: int, steps: int = 2) -> tuple[Operation, ...]:
    """An embedding of rows so wide: looked up, its gradient scattered, and added to it after so many steps."""
    table, rows = (4096, width), (64, width)
    every = [
        operation("input", shape=table, name="table"),
        operation("input", shape=(64, 1), name="places"),
        operation("gather", 0, 1, shape=rows),
        operation("literal", shape=(), tag=("float", 0.0)),
        operation("broadcast", 3, shape=table, tag=()),
        operation("update", 4, 1, 2, shape=table, name="scatter-add"),
    ]
    for _ in range(steps - 1):
        every.append(operation("elementwise", len(every) - 1, shape=table, name="tanh"))
    return (*every, operation("elementwise", 0, len(every) - 1, shape=table, name="add"))


@pytest.mark.parametrize(("width", "steps"), [(16, 2), (32, 3), (64, 7), (80, 9), (100, 9)])
def test_a_table_scattered_in_rows_is_updated_in_rows_and_copied_back(width: int, steps: int) -> None:
    """As SGD, momentum, AdaGrad and Adam of f32[50000,width], and DLRM, f32[32768,64] and its momentum."""
    every = scattered(width, steps)
    made, place = copied(every, (len(every) - 1,))
    assert stored(made[place[5]]) == stored(operation("input", shape=(4096, 128)))
    result = made[place[-1]]
    assert (result.name, result.shape) == ("copy", (4096, width))
    (added,) = result.operands
    assert made[added].shape == (4096, 128)
    (table, gradient) = made[added].operands
    assert gradient == place[-2]
    assert (made[table].name, made[table].operands) == ("copy", (place[0],))
    assert made[place[2]].operands[0] == table


@pytest.mark.parametrize(("width", "steps"), [(16, 3), (32, 5), (64, 9)])
def test_rows_of_which_much_is_computed_are_copied_back_once_they_are_scattered(width: int, steps: int) -> None:
    """As momentum, moments' sums and Adam of f32[50000,width], and DLRM's tables cut by columns, bf16[32768,16]."""
    every = scattered(width, steps)
    made, place = copied(every, (len(every) - 1,))
    back = made[place[5]]
    assert (back.name, back.shape) == ("copy", (4096, width))
    assert made[back.operands[0]].shape == (4096, 128)
    assert made[place[6]].operands == (place[5],)
    assert made[place[-1]].operands == (place[0], place[-2])


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
