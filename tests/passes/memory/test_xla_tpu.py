"""XLA's TPU compiler: arrays in tiles, products that go on with what reads them, and what there is room for on chip."""

from __future__ import annotations

import random

import pytest

from passes.cluster import parse_cluster
from passes.memory.accounting import model_of, nbytes_in
from passes.memory.on_chip import off_chip
from passes.memory.packing import Span
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_layouts import nbytes, stored
from passes.memory.xla_tpu import ON_CHIP_NBYTES, schedule
from passes.placement import resharding_plan
from tests.passes.intra_op.test_assemblies import GRAPH, GROUPING, MESH, RESHARDER, whole
from tests.passes.memory.device_programs import TABLE, drawn, operation

SEEDS = range(50)
V5E = parse_cluster("8:tpu-v5e").group().device

STORED = {
    ((1024,), "float32"): 4096,
    ((4096,), "bfloat16"): 8192,
    ((1024, 4096), "bfloat16"): 2 * 1024 * 4096,
    ((64,), "float32"): 512,
    ((1,), "float32"): 512,
    ((3, 16, 64), "float32"): 4 * 3 * 16 * 128,
    ((1024, 3, 16, 64), "float32"): 4 * 1024 * 3 * 16 * 64,
    ((8, 512, 3, 16, 64), "bfloat16"): 2 * 8 * 512 * 3 * 16 * 64,
}
"""Shapes and dtypes -> bytes in the memory of a TPU, by the layouts that libtpu 0.0.42 chooses."""


@pytest.mark.parametrize(("shape", "dtype"), STORED)
def test_arrays_lie_in_tiles_as_the_compiler_lays_them_out(shape: tuple[int, ...], dtype: str) -> None:
    assert nbytes_in(V5E, shape, dtype) == nbytes(shape, dtype) == STORED[shape, dtype]
    assert stored(operation("input", shape=shape)) == nbytes(shape, "float32")


def test_no_array_takes_less_than_its_elements_and_other_devices_pad_nothing() -> None:
    r = random.Random(0)
    gpu = parse_cluster("8:h100").group().device
    for _ in range(200):
        shape = tuple(r.choice((1, 2, 3, 5, 8, 64, 100, 128, 1000)) for _ in range(r.randrange(4)))
        assert nbytes_in(V5E, shape, "float32") >= nbytes_in(gpu, shape, "float32")


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_read_what_is_in_memory_and_run_after_it(seed: int) -> None:
    program = drawn(seed)
    kernels = {kernel.operation: kernel for kernel in fuse(program.operations, program.outputs)}
    assert set(program.outputs) <= kernels.keys()
    order = schedule(program, list(kernels.values()))
    at = {operation: position for position, operation in enumerate(order)}
    for kernel in kernels.values():
        assert set(kernel.over) <= set(kernel.reads)
        assert all(at[read] < at[kernel.operation] for read in kernel.reads)


def test_a_product_goes_on_to_the_first_array_of_several_readers() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE),
        operation("elementwise", 1, 0, shape=TABLE, name="add"),
        operation("expensive", 2, shape=TABLE, name="tanh"),
        operation("dot", 3, 0, shape=TABLE, name="next"),
        operation("elementwise", 2, 4, shape=TABLE, name="multiply"),
    )
    kernels = {kernel.operation: kernel.reads for kernel in fuse(every, (5,))}
    assert kernels == {0: (), 2: (0,), 5: (0, 2)}


def test_what_normalises_is_computed_again_in_every_product_that_reads_it() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("reduce", 0, name="reduce-sum"),
        operation("broadcast", 1, shape=TABLE, tag=(0,)),
        operation("elementwise", 0, 2, shape=TABLE, name="subtract"),
        operation("dot", 3, 0, shape=TABLE),
        operation("dot", 0, 3, shape=TABLE),
    )
    kernels = {kernel.operation: kernel.reads for kernel in fuse(every, (4, 5))}
    assert kernels == {0: (), 1: (0,), 4: (0, 1), 5: (0, 1)}


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_on_the_chip_has_room_there_at_every_moment(seed: int) -> None:
    r, moments, room = random.Random(seed), 12, 100
    spans = [
        Span(r.randrange(1, 60), first, r.randrange(first, moments), made_by=i)
        for i, first in enumerate(r.choices(range(moments), k=20))
    ]
    outside = off_chip(spans, moments, room)
    inside = [span for span in spans if span not in outside]
    for moment in range(moments):
        assert sum(span.nbytes for span in inside if span.first <= moment <= span.last) <= room
    assert off_chip(spans, moments, 0) == spans
    assert off_chip(spans, moments, 60 * len(spans)) == []
    assert all(span in off_chip(spans, moments, room // 2) for span in outside if span.nbytes > room // 2)


def test_what_is_small_has_no_place_beside_the_chip() -> None:
    layout = whole()
    step = GRAPH, GROUPING, MESH, layout, resharding_plan(GRAPH, layout, RESHARDER), {0: 0}
    assert model_of(V5E)(*step).holders == ()
    assert set(ON_CHIP_NBYTES) >= {"tpu-v5e", "tpu-v5p", "tpu-v6e"}
