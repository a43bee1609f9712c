"""Images in tiles of batch and features, by what libtpu 0.0.42 made of a DenseNet and of U-Nets."""

from __future__ import annotations

import pytest

from passes.memory.operations import Operation
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_images import images
from passes.memory.tpu_layouts import stored
from tests.passes.memory.device_programs import drawn, narrow, operation

IMAGES = {(32, 96, 96, 160): 150994944, (32, 96, 96, 64): 75497472, (4, 256, 256, 64): 67108864}
"""Shapes of images in bfloat16 -> bytes, as the compiler lays them out on v5e."""


def network(shape: tuple[int, ...]) -> tuple[Operation, ...]:
    """Images with what is made of each element, joined to themselves and convolved, and beside them a table."""
    batch, *between, features = shape
    wide, kernel = (batch, *between, 2 * features), (3, 3, 2 * features, features)
    return (
        narrow("input", shape=shape, name="images"),
        narrow("expensive", 0, shape=shape, name="tanh"),
        narrow("rearrange", 1, 0, shape=wide, name="concatenate"),
        narrow("input", shape=kernel, name="weights"),
        narrow("opaque", 2, 3, shape=shape, name="convolution"),
        narrow("elementwise", 4, 1, shape=shape, name="add"),
        narrow("elementwise", 0, shape=shape, name="negate"),
        narrow("bitcast", 6, shape=(batch, features * between[0] * between[1])),
    )


@pytest.mark.parametrize("shape", IMAGES)
def test_operands_and_results_of_convolutions_lie_in_tiles_of_batch_and_features(shape: tuple[int, ...]) -> None:
    every = network(shape)
    made, place = images(every, (5, 7))
    assert place == tuple(range(len(every)))
    assert [operation.is_image for operation in made] == [False, True, True, False, True, True, False, False]
    assert stored(made[4]) == stored(made[5]) == IMAGES[shape] >= stored(every[4])


def test_images_that_are_joined_are_written() -> None:
    made, _ = images(network((4, 8, 8, 64)), (5, 7))
    assert 2 in {kernel.operation for kernel in fuse(made, (5, 7))}
    assert 2 not in {kernel.operation for kernel in fuse(network((4, 8, 8, 64)), (5, 7))}


@pytest.mark.parametrize("seed", range(20))
def test_without_convolutions_all_is_as_it_was(seed: int) -> None:
    program = drawn(seed)
    assert images(program.operations, program.outputs)[0] == program.operations


def block() -> tuple[Operation, ...]:
    """A block of a ConvNeXt: images, their mean taken off, two products, and what these make added to the images."""
    shape = (32, 48, 48, 96)
    return (
        narrow("input", shape=shape, name="images"),
        narrow("input", shape=(7, 7, 1, 96), name="window"),
        narrow("opaque", 0, 1, shape=shape, name="convolution"),
        narrow("elementwise", 2, 2, shape=shape, name="subtract"),
        narrow("input", shape=(96, 96), name="weights"),
        narrow("dot", 3, 4, shape=shape),
        narrow("elementwise", 5, shape=shape, name="negate"),
        narrow("elementwise", 6, 2, shape=shape, name="add"),
        narrow("opaque", 7, 1, shape=shape, name="convolution"),
        narrow("elementwise", 7, 8, shape=shape, name="multiply"),
    )


def test_products_of_rows_read_and_write_arrays_apart_from_images() -> None:
    """What follows from a product in the tiles of images is written, once all that is computed of it there is."""
    made, _ = images(block(), (9,))
    assert [index for index, operation in enumerate(made) if operation.is_image] == [2, 3, 6, 7, 8, 9]
    written = {kernel.operation: kernel.reads for kernel in fuse(made, (9,))}
    assert {3: (2,), 5: (3, 4), 7: (2, 5), 9: (1, 7)}.items() <= written.items()
    assert 3 not in {kernel.operation for kernel in fuse(block(), (9,))}


def test_an_array_gathered_along_features_lies_as_it_was_sent() -> None:
    """The features first: tiles of its first and its last dimension are not those of batch and features."""
    sent = operation("collective", 0, shape=(64, 128, 32, 32), tag=("all_gather", ("x",)))
    for order, is_image in (((1, 2, 3, 0), False), ((3, 1, 2, 0), True)):
        shape = tuple(sent.shape[d] for d in order)
        every = (
            operation("input", shape=(16, 128, 32, 32), name="images"),
            sent,
            operation("transpose", 1, shape=shape, tag=order),
            operation("input", shape=(3, 3, shape[-1], 8), name="weights"),
            operation("opaque", 2, 3, shape=(*shape[:-1], 8), name="convolution"),
        )
        made, _ = images(every, (4,))
        assert [made[1].is_image, made[4].is_image] == [is_image, True]
