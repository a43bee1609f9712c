"""Arrays beside the chip where two cores share every kernel."""

from __future__ import annotations

import pytest

from passes.memory.liveness import lifetimes
from passes.memory.overlap import schedule
from passes.memory.tpu_fusion import fuse
from passes.memory.two_cores import beside_chip, is_loop
from tests.passes.memory.device_programs import TABLE, drawn, operation, program

SEEDS = range(50)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_buffer_may_leave_its_place_while_it_lives(seed: int) -> None:
    made = drawn(seed)
    kernels = fuse(made.operations, made.outputs)
    alive = lifetimes(made, kernels, {}, schedule(made, kernels, hides=False))
    begins = range(len(alive.order) + 1)
    moment = beside_chip(made, kernels, alive, begins)
    by_operation = {kernel.operation: kernel for kernel in kernels}
    for buffer in alive.buffers:
        loops = all(is_loop(made.operations, by_operation[o]) for o in buffer.operations)
        assert moment(buffer) == -1 if loops else buffer.first <= moment(buffer) <= buffer.last


def test_a_loop_over_elements_has_several_operations_and_nothing_else() -> None:
    """As libtpu 0.0.42 places them for v5p: what is alone in its kernel is beside the chip, as products are."""
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("elementwise", 0, shape=TABLE, name="negate"),
        operation("elementwise", 1, shape=TABLE, name="add"),
        operation("dot", 2, 2, shape=TABLE),
        operation("elementwise", 3, shape=TABLE, name="multiply"),
        operation("elementwise", 4, shape=TABLE, name="convert bfloat16"),
    )
    kernels = {kernel.operation: kernel for kernel in fuse(every, (2, 5))}
    assert {o: is_loop(every, kernel) for o, kernel in kernels.items()} == {0: True, 2: True, 5: False}
    (alone,) = [kernel for kernel in fuse(every[:2], (1,)) if kernel.operation == 1]
    assert not is_loop(every[:2], alone)


def test_a_product_is_beside_the_chip_until_its_second_reader_but_sums() -> None:
    """As scores of softmax, whose maximum the product's kernel takes: weights read them, and the backward pass."""
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE),
        operation("reduce", 1, name="reduce-max"),
        operation("dot", 1, 0, shape=TABLE, name="first"),
        operation("dot", 1, 3, shape=TABLE, name="second"),
        operation("dot", 1, 4, shape=TABLE, name="third"),
    )
    made = program(every, (2, 5))
    kernels = fuse(every, made.outputs)
    alive = lifetimes(made, kernels, {}, schedule(made, kernels, hides=False))
    moment = beside_chip(made, kernels, alive, range(len(alive.order) + 1))
    (scores,) = [buffer for buffer in alive.buffers if buffer.operations == (1,)]
    assert moment(scores) == alive.order.index(4) < scores.last
