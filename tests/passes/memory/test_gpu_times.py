"""Seconds of kernels on GPUs, and the arrays that are written for them: few columns, long rows, wide types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from passes.memory.gpu_cycles import H100, Arithmetic
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_times import COPY, Times, Turn
from passes.memory.operations import Operation, Shape
from tests.passes.memory.device_programs import narrow, operation
from tests.passes.memory.gpu_kernels import priorities

A100 = replace(H100, capability=(8, 0), cycles_per_second=19.49e12, bytes_per_second=2.039e12, cores=108)


def seconds(every: Sequence[Operation], root: int, read: Mapping[int, float], arithmetic: Arithmetic = H100) -> float:
    """The time of a kernel that computes its root alone."""
    times = Times(every, arithmetic)
    nbytes = times.nbytes(root, times.works[root], read, times.wholes[root], times.turns[root])
    return nbytes / arithmetic.bytes_per_second


@pytest.mark.parametrize(("columns", "is_slow"), [(512, True), (2**15, False)])
def test_a_sum_of_few_columns_is_slow(columns: int, is_slow: bool) -> None:
    shape: Shape = (128, columns)
    every = [operation("input", shape=shape), operation("reduce", 0, shape=(columns,), tag=("reduce-sum", (0,)))]
    assert (seconds(every, 1, {0: 1.0}) > 1.5 * every[0].nbytes / H100.bytes_per_second) == is_slow


@pytest.mark.parametrize(
    ("shape", "order", "turn", "microseconds"),
    [
        ((8, 512, 8, 2, 32), (0, 2, 4, 1, 3), Turn.LOOP, 69.9),
        ((384, 512), (1, 0), Turn.TILED, 0.78),
        ((8, 512, 8, 64), (0, 2, 1, 3), Turn.NONE, 8.2),
    ],
)
def test_a_transpose_is_made_by_tiles_or_reads_64_bytes_for_each_element(
    shape: Shape, order: Shape, turn: Turn, microseconds: float
) -> None:
    """A100: the first is of a step of LLaMA."""
    turned = tuple(shape[d] for d in order)
    every = [operation("input", shape=shape), operation("transpose", 0, shape=turned, tag=order)]
    assert Times(every, A100).turns[1] == turn
    assert seconds(every, 1, {0: 1.0}, A100) * 1e6 == pytest.approx(microseconds, rel=0.02)


@pytest.mark.parametrize(("shape", "microseconds"), [((128, 48), 0.10), ((384, 16), 0.020)])
def test_few_tiles_read_slowly(shape: Shape, microseconds: float) -> None:
    """Two tiles of 64 by 64, and twelve of 32 by 32, in a step of LLaMA on H100."""
    every = [narrow("input", shape=shape), narrow("transpose", 0, shape=shape[::-1], tag=(1, 0))]
    assert seconds(every, 1, {0: 1.0}) * 1e6 == pytest.approx(microseconds, rel=0.05)


def test_threads_of_a_large_loop_compute_several_elements() -> None:
    """What is broadcast comes from a cache, which fewer blocks read more slowly: so XLA has it on A100."""
    shape: Shape = (8, 128, 256)
    every = [
        operation("input", shape=shape, tag=0),
        operation("input", shape=(8, 256), tag=1),
        operation("elementwise", 0, 1, shape=shape, name="divide"),
    ]
    again = shape[0] * shape[1] * shape[2] / (8 * 256)
    more = [seconds(every, 2, {0: 1.0, 1: again}, a) - seconds(every, 2, {0: 1.0}, a) for a in (A100, H100)]
    assert more[0] * 1e6 == pytest.approx(0.049, rel=0.02)
    assert more[1] * 1e6 == pytest.approx(0.018, rel=0.05)


@pytest.mark.parametrize(("groups", "is_written"), [(8, True), (256, False)])
def test_exponents_of_which_few_columns_are_added_up_are_written(groups: int, is_written: bool) -> None:
    shape: Shape = (groups, 128, 256)
    every = [
        Operation("input", (), shape, "bfloat16", -1, tag=0),
        operation("input", shape=(groups, 256), tag=1),
        operation("broadcast", 1, shape=shape, tag=(0, 2)),
        Operation("elementwise", (0,), shape, "float32", -1, tag="convert bfloat16"),
        operation("elementwise", 3, 2, shape=shape, name="subtract"),
        operation("elementwise", 4, shape=shape, name="exponential"),
        operation("reduce", 5, shape=(groups, 256), tag=("reduce-sum", (1,))),
        operation("broadcast", 6, shape=shape, tag=(0, 2)),
        operation("elementwise", 5, 7, shape=shape, name="divide"),
        operation("elementwise", 5, 8, shape=shape, name="multiply"),
        operation("reduce", 9, shape=(groups, 256), tag=("reduce-sum", (1,))),
    ]
    assert (5 in {kernel.operation for kernel in fuse(every, (8, 10))}) == is_written


@pytest.mark.parametrize(("size", "dimension", "is_ragged"), [(48, 1, True), (64, 1, False), (48, 0, False)])
def test_arrays_joined_within_a_warp_are_ragged(size: int, dimension: int, is_ragged: bool) -> None:
    shape = (64, 64, 64)
    parts = [operation("input", shape=(*shape[:dimension], size, *shape[dimension + 1 :]), tag=tag) for tag in (0, 1)]
    joined = operation("rearrange", 0, 1, shape=shape, tag=("concatenate", dimension))
    times = Times([*parts, joined], H100)
    assert times.is_ragged(2) == is_ragged


@pytest.mark.parametrize("tokens", [256, 2**16])
def test_a_widened_stream_is_computed_by_its_readers_and_a_large_sum_is_written(tokens: int) -> None:
    """A residual stream in bfloat16 and its normalisation in float32."""
    shape: Shape = (tokens, 256)
    every = [
        *(Operation("input", (), shape, "bfloat16", -1, tag=tag) for tag in range(3)),
        Operation("elementwise", (0, 1), shape, "bfloat16", -1, tag="add"),
        Operation("elementwise", (3, 2), shape, "bfloat16", -1, tag="add"),
        Operation("elementwise", (4,), shape, "float32", -1, tag="convert bfloat16"),
        operation("reduce", 5, shape=(tokens,), tag=("reduce-sum", (1,))),
        operation("elementwise", 5, shape=shape, name="square"),
        operation("reduce", 7, shape=(tokens,), tag=("reduce-sum", (1,))),
        operation("elementwise", 5, shape=shape, name="negate"),
        operation("dot", 9, 9, shape=(256, 256), tag=("merged",)),
        Operation("elementwise", (4, 0), shape, "bfloat16", -1, tag="multiply"),
    ]
    written = set(priorities(every, (6, 8, 9, 10, 11)).run())
    assert (4 in written) == (tokens > 2**15)
    assert 5 not in written


@pytest.mark.parametrize(("columns", "is_written"), [(2**15, True), (16, False)])
def test_the_logarithm_of_each_row_is_computed_once_where_rows_are_long(columns: int, is_written: bool) -> None:
    shape: Shape = (2048, columns)
    every = [
        operation("input", shape=shape, tag=0),
        operation("input", shape=shape[:1], tag=1),
        operation("expensive", 1, shape=shape[:1], name="log"),
        operation("broadcast", 2, shape=shape, tag=(0,)),
        operation("elementwise", 0, 3, shape=shape, name="subtract"),
    ]
    assert (2 in {kernel.operation for kernel in fuse(every, (4,))}) == is_written


def test_an_operation_of_narrower_numbers_gains_more_than_its_readers() -> None:
    """Scores in bfloat16, masked and exponentiated in float32 for sums of few columns: exponents are written."""
    shape: Shape = (8, 128, 256)
    every = [
        Operation("input", (), shape, "bfloat16", -1, tag=0),
        Operation("elementwise", (0,), shape, "float32", -1, tag="convert bfloat16"),
        operation("elementwise", 1, shape=shape, name="select"),
        operation("reduce", 2, shape=(8, 256), tag=("reduce-max", (1,))),
        operation("broadcast", 3, shape=shape, tag=(0, 2)),
        operation("elementwise", 2, 4, shape=shape, name="subtract"),
        operation("elementwise", 5, shape=shape, name="exponential"),
        operation("reduce", 6, shape=(8, 256), tag=("reduce-sum", (1,))),
        operation("broadcast", 7, shape=shape, tag=(0, 2)),
        operation("elementwise", 6, 8, shape=shape, name="divide"),
        operation("elementwise", 6, 9, shape=shape, name="multiply"),
        operation("reduce", 10, shape=(8, 256), tag=("reduce-sum", (1,))),
    ]
    written = {kernel.operation for kernel in fuse(every, (9, 11))}
    assert 6 in written
    assert 2 not in written


def test_a_copy_in_another_order_is_read_from_memory_where_it_has_several_readers() -> None:
    shape: Shape = (8, 128, 256)
    every = [
        operation("input", shape=shape),
        operation("rearrange", 0, shape=shape, tag=(COPY, 0)),
        operation("elementwise", 1, shape=shape, name="negate"),
        operation("elementwise", 2, shape=shape, name="square"),
        operation("elementwise", 2, shape=shape, name="abs"),
    ]
    times = Times(every, H100)
    assert times.is_copied(2)
    assert not times.is_copied(0)
    assert 2 in {kernel.operation for kernel in fuse(every, (3, 4))}
