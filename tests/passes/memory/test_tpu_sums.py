"""Sums that XLA:TPU takes in the kernel that writes what is added up."""

from __future__ import annotations

from passes.cluster import parse_cluster
from passes.memory.liveness import lifetimes
from passes.memory.moments import Cost, moments, nothing, read_at
from passes.memory.tpu_costs import cost_on
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_sums import joined
from tests.passes.memory.device_programs import ROWS, TABLE, operation, program

V5E = parse_cluster("8:tpu-v5e").group().device

EVERY = (
    operation("input", shape=TABLE, tag=0),
    operation("dot", 0, 0, shape=TABLE, tag=("merged",)),
    operation("reduce", 1, name="reduce-max"),
    operation("elementwise", 1, 0, shape=TABLE, name="multiply"),
    operation("reduce", 3, name="reduce-sum"),
    operation("broadcast", 2, shape=TABLE, tag=(0,)),
    operation("elementwise", 1, 5, shape=TABLE, name="subtract"),
    operation("reduce", 6, name="reduce-sum"),
)
"""A product, its largest, its sum with what was there before, and one of what follows from the largest."""
MADE = program(EVERY, (1, 2, 4, 7))
ORDER = (0, 1, 2, 4, 7)


def test_a_sum_is_taken_with_what_it_adds_up_unless_it_needs_what_is_made_later() -> None:
    assert joined(MADE, fuse(EVERY, MADE.outputs), ORDER) == {2: 1, 4: 1}


def test_a_product_and_its_sum_are_written_wide_for_a_gather() -> None:
    narrow = operation("dot", 0, 0, shape=TABLE, tag=("merged",))._replace(dtype="bfloat16")
    every = (
        operation("input", shape=TABLE, tag=0),
        narrow,
        operation("elementwise", 1, shape=TABLE, name="convert bfloat16"),
        operation("reduce", 2, name="reduce-max"),
        operation("gather", 2, 0, shape=ROWS),
    )
    made = program(every, (1, 3, 4))
    assert joined(made, fuse(every, made.outputs), (0, 1, 2, 3, 4)) == {2: 1, 3: 1}


def test_collectives_and_scattered_sums_are_not_joined() -> None:
    sent = operation("collective", 0, shape=TABLE, tag=("all_gather", ("x",)))
    every = (
        operation("input", shape=TABLE, tag=0),
        sent,
        operation("reduce", 1, name="reduce-sum"),
        operation("dot", 0, 0, shape=TABLE, tag=("merged",)),
        operation("reduce", 3, name="scatter-add"),
    )
    made = program(every, (1, 2, 3, 4))
    assert joined(made, fuse(every, made.outputs), (0, 1, 2, 3, 4)) == {}


def test_kernels_that_run_as_one_read_once() -> None:
    kernels = fuse(EVERY, MADE.outputs)
    alive, joint = lifetimes(MADE, kernels, {}, ORDER), joined(MADE, kernels, ORDER)
    apart = moments(MADE, kernels, alive.order, (), {}, cost_on(V5E))
    run = moments(MADE, kernels, alive.order, (), {}, cost_on(V5E), joint)
    assert run.costs[2] == run.costs[3] == Cost()
    assert apart.costs[1].moving < run.costs[1].moving < sum(cost.moving for cost in apart.costs[1:4])
    assert run.costs[4] == apart.costs[4]
    assert {*read_at(alive, run, joint)(1)} == {4} < {*read_at(alive, apart)(1)}
    assert {*read_at(alive, run, joint)(0)} == {1}
    assert moments(MADE, kernels, alive.order, (), {}, nothing, joint).costs == (Cost(),) * 5
