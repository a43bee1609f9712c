"""Tables of copies and of kernels that write several arrays."""

from __future__ import annotations

from passes.memory.liveness import lifetimes
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_tables import tables
from tests.passes.memory.device_programs import TABLE, operation, program


def test_copies_and_kernels_of_several_results_have_tables() -> None:
    """Two arguments; two results that loops write, one following from the other; a product that is read later."""
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("input", shape=TABLE, tag=1),
        operation("dot", 0, 0, shape=TABLE),
        operation("dot", 2, 0, shape=TABLE, name="next"),
        operation("reduce", 3, name="reduce-sum"),
        operation("elementwise", 1, 2, shape=TABLE, name="multiply"),
        operation("elementwise", 5, 3, shape=TABLE, name="add"),
        operation("elementwise", 6, 0, shape=TABLE, name="subtract"),
        operation("elementwise", 7, 0, shape=TABLE, name="multiply"),
    )
    made = program(every, (6, 8, 4))
    kernels = fuse(every, made.outputs)
    alive = lifetimes(made, kernels, {}, [0, 1, 2, 3, 4, 6, 8])
    arguments, results, copied, updates, sums = 2, 2, 2, 1, 1
    assert tables(made, kernels, alive) == arguments + results + copied + updates + sums


def test_a_table_that_the_next_kernel_alone_reads_is_not_copied() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE),
        operation("dot", 1, 0, shape=TABLE, name="next"),
        operation("dot", 2, 1, shape=TABLE, name="last"),
    )
    made = program(every, (3,))
    kernels = fuse(every, made.outputs)
    arguments, read_later = 1, 1
    assert tables(made, kernels, lifetimes(made, kernels, {}, [0, 1, 2, 3])) == arguments + read_later
