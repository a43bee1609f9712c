"""Moments of a program on a TPU, one for each kernel, and the seconds that kernels take."""

from __future__ import annotations

from dataclasses import replace

from passes.cluster import parse_cluster
from passes.ir import Node
from passes.memory.liveness import lifetimes
from passes.memory.moments import LOOP_RUNS, Cost, Moments, moments, nothing, read_at
from passes.memory.overlap import schedule
from passes.memory.tpu_costs import cost_on
from passes.memory.tpu_fusion import fuse
from tests.passes.memory.device_programs import TABLE, operation, program

V5E = parse_cluster("8:tpu-v5e").group().device
NODES = (Node(primitive="scan", inputs=(), outputs=(), params={}, source="loop.py"),)
BODY = Moments(
    sources=("", "inside.py"), costs=(Cost(1.0, 2.0), Cost(0.0, 1.0)), begins=(0, 1, 2), loops=frozenset({(1, 1)})
)


def test_a_body_runs_in_the_place_of_its_loop() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("loop", 0, shape=(0,), tag=0)._replace(node=0),
        operation("result", 1, shape=TABLE, tag=0),
        operation("elementwise", 2, 0, shape=TABLE, name="add"),
    )
    made = program(every, (3,))
    kernels = fuse(every, made.outputs)
    alive = lifetimes(made, kernels, {}, schedule(made, kernels, hides=False))
    run = moments(made, kernels, alive.order, NODES, {0: BODY}, nothing)
    at = alive.order.index(1)
    first, last = run.of(at)
    assert (first, last) == (run.begins[at], run.begins[at] + 1)
    assert run.loops == {(first, last), (first + 1, first + 1)}
    assert run.sources[first : last + 1] == ("loop.py", "inside.py")
    assert run.costs[first] == Cost(LOOP_RUNS, 2 * LOOP_RUNS)
    assert {*read_at(alive, run)(0)} >= {first, last}
    assert run.begins[-1] == len(run.sources) == len(run.costs)


def test_a_kernel_costs_its_flops_and_the_bytes_that_it_moves() -> None:
    every = (
        operation("input", shape=(128, 256), tag=0),
        operation("input", shape=(256, 512), tag=1),
        operation("dot", 0, 1, shape=(128, 512), tag=("merged",)),
        operation("elementwise", 2, shape=(128, 512), name="tanh"),
        operation("collective", 3, shape=(128, 512), tag=("all_reduce", ("x",), "add", -1, -1)),
    )
    costs = {k.operation: cost_on(V5E)((k,), every) for k in fuse(every, (4,))}
    assert costs[0] == costs[4] == Cost()
    nbytes = 4 * (128 * 256 + 256 * 512 + 128 * 512)
    flops, rate = 2 * 128 * 256 * 512, V5E.flops_per_second["bfloat16"]
    assert costs[3] == Cost(flops / rate, nbytes / V5E.memory_bytes_per_second)


def test_a_measured_device_may_have_the_rate_of_one_dtype() -> None:
    measured = replace(V5E, flops_per_second={"float32": 2.0})
    every = (operation("input", shape=(1, 3), tag=0), operation("dot", 0, 0, shape=(1, 1), tag=("merged",)))
    (dot,) = [k for k in fuse(every, (1,)) if k.reads]
    assert cost_on(measured)((dot,), every).computing == 3.0


def test_convolutions_multiply_every_tap() -> None:
    every = (
        operation("input", shape=(8, 16, 16, 32), tag=0),
        operation("input", shape=(3, 3, 32, 64), tag=1),
        operation("opaque", 0, 1, shape=(8, 16, 16, 64), name="convolution"),
    )
    (convolution,) = [k for k in fuse(every, (2,)) if k.reads]
    flops = 2 * 8 * 16 * 16 * 64 * 3 * 3 * 32
    assert cost_on(V5E)((convolution,), every).computing == flops / V5E.flops_per_second["bfloat16"]
