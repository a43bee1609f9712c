"""The library of XLA's CPU compiler takes sums inside of sums, writes over what it reads in place, and is no place for
short or long reductions of a few elements.
"""

from __future__ import annotations

from passes.memory.fusion import Kernel, fuse
from passes.memory.library_kernels import WINDOW
from passes.memory.operations import Operation

WIDE, ROWS = (64, 128), (64,)


def operation(kind, operands=(), shape=WIDE, tag=None) -> Operation:
    return Operation(kind, tuple(operands), shape, "float32", -1, tag=tag)


def kernels(*operations: Operation) -> dict[int, Kernel]:
    return {kernel.operation: kernel for kernel in fuse(operations, (len(operations) - 1,))}


SUM = ("reduce-sum", (1,))


def test_a_sum_that_a_sum_reads_is_inside_of_its_kernel() -> None:
    squared, inner = operation("elementwise", (0, 0), tag="multiply"), operation("reduce", (1,), ROWS, SUM)
    spread, scaled = operation("broadcast", (2,), WIDE, (0,)), operation("elementwise", (0, 3), tag="multiply")
    outer = operation("reduce", (4,), ROWS, SUM)
    assert kernels(operation("input"), squared, inner, spread, scaled, outer).keys() == {0, 5}


def test_a_kernel_is_written_over_what_it_reads_element_by_element_alone() -> None:
    summed, spread = operation("reduce", (0,), ROWS, SUM), operation("broadcast", (2,), WIDE, (0,))
    scaled = operation("elementwise", (1, 3), tag="multiply")
    made = kernels(operation("input"), operation("input"), summed, spread, scaled)
    assert (made[4].reads, made[4].over) == ((0, 1), (1,))


def test_a_long_reduction_of_few_elements_is_read_from_memory_and_a_short_one_is_not() -> None:
    for length in (WINDOW, 2 * WINDOW):
        few = operation("input", (), (length,))
        negative = operation("elementwise", (0,), (length,), "negate")
        total = operation("reduce", (1,), (), ("reduce-sum", (0,)))
        made = kernels(few, negative, total, operation("elementwise", (2,), (), "negate"))
        assert made.keys() == ({0, 3} if length == WINDOW else {0, 1, 2, 3})
