"""Softmax on GPUs: rows less their maximum are written where kernels other than Triton's read them."""

from __future__ import annotations

import pytest

from passes.memory.fusion import Kernel
from passes.memory.gpu_costs import microseconds
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_softmax import apart, begun_by
from passes.memory.operations import Operation
from tests.passes.memory.device_programs import ROWS, TABLE, operation
from tests.passes.memory.gpu_kernels import MATRIX, written

BY_COLUMNS = ("reduce-max", (0,))
ALL = ("reduce-sum", (0,))


def shifted(*, largest: object = None) -> list[Operation]:
    """Logits, a product that is converted, less their largest in each row; its exponents and their sum."""
    rows = TABLE[1:] if largest == BY_COLUMNS else ROWS
    return [
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE, tag=(((1,), (0,)), ((), ()))),
        operation("elementwise", 1, shape=TABLE, name="convert bfloat16"),
        operation("reduce", 2, shape=rows, name="reduce-max", tag=largest),
        operation("broadcast", 3, shape=TABLE, tag=(1,) if largest == BY_COLUMNS else (0,)),
        operation("elementwise", 2, 4, shape=TABLE, name="subtract"),
        operation("expensive", 5, shape=TABLE, name="exponential"),
        operation("reduce", 6, name="reduce-sum"),
        operation("expensive", 7, name="log"),
        operation("broadcast", 8, shape=TABLE, tag=(0,)),
        operation("elementwise", 5, 9, shape=TABLE, name="subtract"),
    ]


def test_logits_of_which_labels_are_picked_are_written_less_their_maximum() -> None:
    picked = [*shifted(), operation("input", tag=1), operation("gather", 10, 11)]
    assert 5 in written(picked, 12)
    assert 10 not in written(picked, 12)


def test_a_scattered_softmax_is_written_less_its_maximum() -> None:
    """A scatter that is fused with what it adds says of itself where it adds, and no dimensions."""
    scattered = [
        *shifted(),
        operation("broadcast", shape=TABLE),
        operation("input", tag=1),
        operation("reduce", 11, 12, 10, shape=TABLE, tag=("scatter-add", 7)),
    ]
    readers = [[r for r, o in enumerate(scattered) if i in o.operands] for i in range(14)]
    ends, _ = apart(scattered, readers, begun_by(scattered, readers))
    assert 10 in ends


def test_a_softmax_for_a_product_is_one_kernel() -> None:
    softmax = [*shifted(), operation("expensive", 10, shape=TABLE, name="exponential")]
    kernels = written([*softmax, operation("dot", 11, 0, shape=TABLE, tag=(((1,), (0,)), ((), ())))], 12)
    assert 11 in kernels
    assert kernels.isdisjoint({3, 5, 6, 7, 8, 10}), "its rows' maxima and sums are made in it, too"


def test_maxima_are_found_again_by_every_kernel_that_takes_them_away() -> None:
    every = [
        *shifted(),
        operation("expensive", 10, shape=TABLE, name="exponential"),
        operation("dot", 11, 0, shape=TABLE, tag=MATRIX),
        operation("elementwise", 12, 10, shape=TABLE, name="multiply"),
    ]
    assert 3 not in written(every, 13)


def test_a_sum_of_rows_is_written_where_it_is_an_output_too() -> None:
    softmax = [*shifted(), operation("expensive", 10, shape=TABLE, name="exponential")]
    assert 7 in written([*softmax, operation("dot", 11, 0, shape=TABLE, tag=MATRIX)], 12, 7)


def test_kernels_of_triton_are_not_estimated() -> None:
    """XLA's scheduler has no time for them: what waits for one may run beside it."""
    every = [*shifted(), operation("expensive", 10, shape=TABLE, name="exponential")]
    (made,) = (kernel for kernel in fuse(every, (11,)) if kernel.operation == 11)
    assert microseconds([made], every) == 0.01
    assert microseconds([Kernel(operation=11, reads=made.reads, over=())], every) != 0.01


def test_nothing_is_apart_where_no_maximum_is_taken_away() -> None:
    every = [operation("input", shape=TABLE, tag=0), operation("elementwise", 0, shape=TABLE, name="negate")]
    assert apart(every, ([1], []), ()) == (frozenset(), frozenset())


def test_a_softmax_summed_over_all_rows_is_written_for_that() -> None:
    """As the loss of labels by their shares is: sums of rows and of all are one."""
    labels = [*shifted(), operation("input", shape=TABLE, tag=1), operation("elementwise", 10, 11, shape=TABLE)]
    by_rows = operation("reduce", 12, name="reduce-sum")
    assert 12 not in written([*labels, by_rows], 13)
    assert 12 in written([*labels, by_rows, operation("reduce", 13, shape=(), name="reduce-sum", tag=ALL)], 14)


@pytest.mark.parametrize("reason", ["another order", "the largest of columns", "read twice"])
def test_other_differences_are_computed_where_they_are_read(reason: str) -> None:
    every = shifted(largest=BY_COLUMNS if reason == "the largest of columns" else None)
    if reason == "another order":
        every[5] = operation("elementwise", 4, 2, shape=TABLE, name="subtract")
    picked = [*every, operation("input", tag=1), operation("gather", 10, 11)]
    outputs = (12,)
    if reason == "read twice":
        picked.append(operation("elementwise", 3, name="negate"))
        outputs = (12, 13)
    assert 5 not in written(picked, *outputs)


@pytest.mark.parametrize("centred", [True, False])
def test_the_parts_of_a_product_are_added_up_before_the_mean_of_rows_is_taken_from_them(centred: bool) -> None:
    """Triton's kernel for that does not add them up; loops do."""
    every = [
        operation("input", shape=(4, *TABLE), tag=0),
        operation("rearrange", 0, shape=TABLE, name="sum"),
        operation("reduce", 1, name="reduce-sum"),
        operation("literal", shape=(), tag=("float", 1 / 96)),
        operation("broadcast", 3, shape=ROWS, tag=()),
        operation("elementwise", 2, 4, name="multiply"),
        operation("broadcast", 5, shape=TABLE, tag=(0,)),
        operation("elementwise", 1, 6, shape=TABLE, name="subtract" if centred else "add"),
    ]
    assert (1 in written(every, 7)) == centred
