"""Zeros around images whose convolution has more of them at one end, which the library of GPUs does not add itself."""

from __future__ import annotations

import pytest

from passes.ir import Node, TensorType
from passes.memory.operations import Compiler, Operations
from passes.memory.products import convolution

IMAGES, KERNEL, RESULT = (2, 32, 32, 8), (3, 3, 8, 16), (2, 16, 16, 16)
Padding = tuple[tuple[int, int], tuple[int, int]]
UNEVEN: Padding = ((0, 1), (0, 1))


def convolved(
    operations: Operations, images: int, padding: Padding, *, of_kernel: bool = False, apart: int = 1
) -> tuple[int, ...]:
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
        "lhs_dilation": (apart, apart),
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


def test_gradients_of_images_and_other_devices_pad_nothing() -> None:
    assert convolved(*images("gpu"), UNEVEN, apart=2) == IMAGES
    assert convolved(*images("tpu"), UNEVEN) == IMAGES
