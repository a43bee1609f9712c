"""The order in which kernels on GPUs are fused, by what is gained: times that XLA has of steps of LLaMA and BERT."""

from __future__ import annotations

import pytest

from passes.memory.gpu_cycles import H100
from passes.memory.operations import Operation, Shape
from tests.passes.memory.device_programs import narrow, operation
from tests.passes.memory.gpu_kernels import priorities

SCORES: Shape = (8, 128, 256)


def softmax() -> list[Operation]:
    """Scores in bfloat16 whose exponents are added up by columns, and divided by their sum."""
    return [
        narrow("input", shape=SCORES, tag=0),
        operation("input", shape=(8, 256), tag=1),
        operation("elementwise", 0, shape=SCORES, name="convert bfloat16"),
        operation("broadcast", 1, shape=SCORES, tag=(0, 2)),
        operation("elementwise", 2, 3, shape=SCORES, name="subtract"),
        operation("expensive", 4, shape=SCORES, name="exponential"),
        operation("reduce", 5, shape=(8, 256), tag=("reduce-sum", (1,))),
        operation("elementwise", 5, shape=SCORES, name="negate"),
    ]


def test_times_are_those_that_xla_has() -> None:
    every = softmax()
    kernels = priorities(every, (6, 7)).kernels
    microseconds = {root: contents.nbytes / H100.bytes_per_second * 1e6 for root, contents in kernels.items()}
    assert microseconds[4] == pytest.approx(0.9396, abs=2e-3)  # reads two arrays
    assert microseconds[5] == pytest.approx(0.6415, abs=2e-3)
    assert microseconds[6] == pytest.approx(0.529, rel=0.02)  # has few blocks


def test_the_greatest_gain_is_fused_first_and_lowers_those_of_its_operands() -> None:
    every = softmax()
    kernels = priorities(every, (6, 7)).run()
    assert set(kernels) == {0, 1, 5, 6, 7}
    assert kernels[5].inside == [5, 4, 3, 2]
    assert kernels[5].reads == {0: 1.0, 1: 128.0}


def test_a_square_reads_its_operand_twice_until_it_is_fused() -> None:
    every = [
        operation("input", shape=SCORES),
        operation("elementwise", 0, shape=SCORES, name="square"),
        operation("elementwise", 0, shape=SCORES, name="negate"),
    ]
    kernels = priorities(every, (1, 2)).kernels
    assert kernels[1].nbytes == pytest.approx(1.5 * kernels[2].nbytes, rel=0.01)


def test_an_operand_read_at_other_places_is_computed_again() -> None:
    shape: Shape = (256, 256)
    every = [
        operation("input", shape=shape),
        operation("elementwise", 0, shape=shape, name="negate"),
        operation("transpose", 1, shape=shape, tag=(1, 0)),
        operation("elementwise", 1, 2, shape=shape, name="add"),
    ]
    (contents,) = (c for root, c in priorities(every, (3,)).run().items() if root == 3)
    assert contents.inside == [3, 2, 1]
    assert contents.reads == {0: 2.0}


def test_names_are_fused_first() -> None:
    every = [
        operation("input", shape=SCORES),
        operation("elementwise", 0, shape=SCORES, name="tanh"),
        operation("bitcast", 1, shape=(1024, 256)),
        operation("elementwise", 2, shape=(1024, 256), name="negate"),
        operation("elementwise", 1, shape=SCORES, name="negate"),
    ]
    assert 2 not in priorities(every, (3, 4)).run()


def test_an_operation_that_only_names_read_is_a_kernel() -> None:
    every = [
        operation("input", shape=SCORES),
        operation("elementwise", 0, shape=SCORES, name="tanh"),
        operation("bitcast", 1, shape=(1024, 256)),
    ]
    assert set(priorities(every, (2,)).run()) == {0, 1, 2}


def test_a_sum_does_not_bring_what_it_adds_into_another_order() -> None:
    """It would read element by element, where what is brought into order is read tile by tile."""
    images: Shape = (128, 32, 32, 32)
    every = [
        narrow("input", shape=images, tag=0),
        operation("elementwise", 0, shape=images, name="convert bfloat16"),
        operation("transpose", 1, shape=images, tag=(1, 2, 3, 0)),
        operation("input", shape=images, tag=1),
        operation("elementwise", 2, 3, shape=images, name="multiply"),
        operation("reduce", 4, shape=(32,), tag=("reduce-sum", (0, 1, 2))),
    ]
    kernels = priorities(every, (5,)).run()
    assert 2 in kernels, "written in order"
    assert kernels[5].inside == [5, 4]
    straight = [o._replace(kind="elementwise", tag="negate") if o.kind == "transpose" else o for o in every]
    assert set(priorities(straight, (5,)).run()) == {0, 3, 5}
