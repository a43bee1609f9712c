"""Zeros around images whose convolution has more of them at one end, which the library of GPUs does not add itself."""

from __future__ import annotations

import pytest

from passes.ir import Node, TensorType
from passes.memory.operations import Compiler, Operations
from passes.memory.products import convolution

IMAGES, KERNEL, RESULT = (2, 32, 32, 8), (3, 3, 8, 16), (2, 16, 16, 16)
Padding = tuple[tuple[int, int], tuple[int, int]]
UNEVEN: Padding = ((0, 1), (0, 1))


def convolved(operations: Operations, images: int, padding: Padding, *, of_kernel: bool = False) -> tuple[int, ...]:
    """The shape of the images that a convolution with strides reads, or the gradient of its kernel."""
    lhs = (3, 0, 1, 2) if of_kernel else (0, 3, 1, 2)
    rhs = (3, 0, 1, 2) if of_kernel else (3, 2, 0, 1)
    out = (2, 3, 0, 1) if of_kernel else (0, 3, 1, 2)
    second = RESULT if of_kernel else KERNEL
    params = {
        "batch_group_count": 1,
        "dimension_numbers": {"lhs_spec": lhs, "rhs_spec": rhs, "out_spec": out},
        "padding": padding,
        "window_strides": (1, 1) if of_kernel else (2, 2),
        "lhs_dilation": (1, 1),
        "rhs_dilation": (2, 2) if of_kernel else (1, 1),
    }
    node = Node(primitive="conv_general_dilated", inputs=(0, 1), outputs=(2,), params=params)
    weights = operations.add("input", (), second, "bfloat16", "second")
    type = TensorType(shape=KERNEL if of_kernel else RESULT, dtype="bfloat16")
    convolution(operations, node, (images, weights), [type])
    (made,) = [o for o in operations.every if o.name == "convolution"][-1:]
    read = operations[made.operands[0]]
    return operations[read.operands[0]].shape if read.kind == "transpose" else read.shape


def images(compiler: Compiler) -> tuple[Operations, int]:
    operations = Operations(compiler=compiler)
    return operations, operations.add("input", (), IMAGES, "bfloat16", "images")


@pytest.mark.parametrize(
    ("padding", "read"), [(UNEVEN, (2, 33, 33, 8)), (((1, 1), (1, 1)), IMAGES), (((1, 2), (1, 1)), (2, 35, 34, 8))]
)
def test_images_are_padded_where_one_end_has_more_zeros(padding: Padding, read: tuple[int, ...]) -> None:
    assert convolved(*images("gpu"), padding) == read


@pytest.mark.parametrize(
    ("padding", "read"), [(UNEVEN, (2, 33, 33, 8)), (((1, 2), (1, 1)), (2, 33, 32, 8)), (((2, 1), (0, -1)), IMAGES)]
)
def test_the_gradient_of_a_kernel_pads_by_what_one_end_has_to_have_more(
    padding: Padding, read: tuple[int, ...]
) -> None:
    assert convolved(*images("gpu"), padding, of_kernel=True) == read


def test_images_are_padded_once_for_both() -> None:
    operations, read = images("gpu")
    convolved(operations, read, UNEVEN)
    convolved(operations, read, UNEVEN, of_kernel=True)
    assert sum(o.name == "pad" for o in operations.every) == 1


def transposed(compiler: Compiler, *, is_reversed: bool = False, taps: int = 4, made: int = 64) -> tuple[int, ...]:
    """The shape of the images that a transposed convolution reads."""
    operations, read = images(compiler)
    kernel = operations.add("input", (), (taps, taps, 8, 16), "bfloat16", "kernel")
    if is_reversed:
        kernel = operations.add("rearrange", (kernel,), (taps, taps, 8, 16), "bfloat16", "reverse")
    params = {
        "batch_group_count": 1,
        "dimension_numbers": {"lhs_spec": (0, 3, 1, 2), "rhs_spec": (3, 2, 0, 1), "out_spec": (0, 3, 1, 2)},
        "padding": ((2, 2), (2, 2)),
        "window_strides": (1, 1),
        "lhs_dilation": (2, 2),
        "rhs_dilation": (1, 1),
    }
    node = Node(primitive="conv_general_dilated", inputs=(0, 1), outputs=(2,), params=params)
    type = TensorType(shape=(2, made, made, 16), dtype="bfloat16")
    (convolved,) = convolution(operations, node, (read, kernel), [type])
    return operations[operations[convolved].operands[0]].shape


def test_transposed_convolutions_read_images_with_zeros_between_their_pixels() -> None:
    """As of a generator of images on A100: f32[64,64,35,35] for images of 16 x 16. Gradients have none."""
    assert transposed("gpu") == (2, 67, 67, 8)
    assert transposed("gpu", is_reversed=True) == IMAGES
    assert transposed("gpu", taps=1) == IMAGES
    assert transposed("gpu", taps=32, made=4) == IMAGES
    assert transposed("tpu") == IMAGES


def test_other_devices_pad_nothing() -> None:
    assert convolved(*images("tpu"), UNEVEN) == IMAGES
