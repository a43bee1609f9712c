"""Convolutions of gradients on GPUs: the weights that they read, and the kernel that converts those once more."""

from __future__ import annotations

import pytest

from passes.memory.gpu_weights import AGAIN, laid_out
from passes.memory.operations import Operation, Shape
from tests.passes.memory.device_programs import operation
from tests.passes.memory.gpu_kernels import combined_when_fused, joint

IMAGES, CHANNELS = (8, 4, 4, 16), (16, 32)
REDUCED = ("all_reduce", ("x",), "sum")
NARROW = "convert float32"


def layers(window: Shape = (1, 1), result: Shape = IMAGES) -> list[Operation]:
    """The gradient of images, from that of a convolution's result, and the update of its weights, whose gradient is
    reduced across devices: it reads what the update does.
    """
    kernel, turned = (*window, *CHANNELS), (*window, *CHANNELS[::-1])
    gradient: Shape = (8, 4, 4, 32)
    return [
        operation("input", shape=kernel, tag=0),
        operation("input", shape=IMAGES, tag=1),
        operation("expensive", 0, shape=kernel, name=NARROW),
        operation("opaque", 1, 2, shape=gradient, tag=("convolution", 0)),
        operation("rearrange", 2, shape=kernel, tag=("reverse", 1)),
        operation("transpose", 4, shape=turned, tag=(0, 1, 3, 2)),
        operation("opaque", 3, 5, shape=result, tag=("convolution", 2)),
        operation("opaque", 1, 3, shape=kernel, tag=("convolution", 3)),
        operation("collective", 7, shape=kernel, tag=REDUCED),
        operation("elementwise", 8, shape=kernel, name="negate"),
        operation("elementwise", 0, 9, shape=kernel, name="add"),
    ]


def test_the_gradient_of_points_reads_weights_that_are_converted_once_more() -> None:
    changed = laid_out(layers())
    assert changed[5].name == AGAIN
    assert changed[5].operands == (0,)
    assert joint(changed, 6, 10) == {(5, 10)}


@pytest.mark.parametrize(("window", "result"), [((3, 3), IMAGES), ((1, 1), (8, 8, 8, 16))])
def test_the_gradient_over_a_window_or_a_stride_reads_the_weights_of_the_forward_pass(
    window: Shape, result: Shape
) -> None:
    changed = laid_out(layers(window, result))
    assert changed[4].kind == "bitcast"
    assert changed[5] == layers(window, result)[5]
    assert all(10 not in group for group in joint(changed, 6, 10))


def test_weights_that_are_not_converted_are_read_as_they_are() -> None:
    every = layers()
    every[4] = every[4]._replace(operands=(0,))
    assert AGAIN not in {changed.name for changed in laid_out(every)}


def test_reversed_weights_that_something_else_reads_stay_a_copy() -> None:
    every = [*layers(), operation("elementwise", 4, shape=(1, 1, *CHANNELS), name="negate")]
    assert laid_out(every) == every


def test_an_update_that_waits_for_the_gradient_of_images_is_another_kernel() -> None:
    every = layers()
    clipped = operation("reduce", 6, shape=(), tag=("reduce-sum", (0, 1, 2, 3)))
    norm = operation("broadcast", 9, shape=every[10].shape)
    changed = laid_out([*every[:9], clipped, norm, every[10]._replace(operands=(0, 8, 10))])
    assert changed[5].name == AGAIN
    assert all(11 not in group for group in joint(changed, 6, 11))


def test_gradients_of_weights_that_wait_for_each_other_in_that_way_are_not_sent_as_one() -> None:
    every = laid_out(layers())
    earlier = operation("opaque", 1, 6, shape=(1, 1, 16, 16), tag=("convolution", 4))
    sent = operation("collective", 11, shape=earlier.shape, tag=REDUCED)
    both = [*every, earlier, sent]
    joined, place = combined_when_fused(both, (10, 12))
    assert {joined[place[8]].kind, joined[place[12]].kind} == {"collective"}
    apart = [*every[:5], every[5]._replace(tag=("slice", 0)), *every[6:], earlier, sent]
    joined, place = combined_when_fused(apart, (10, 12))
    assert {joined[place[8]].name, joined[place[12]].name} == {"slice"}
