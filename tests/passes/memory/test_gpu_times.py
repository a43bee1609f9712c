"""Seconds of kernels on GPUs, and the arrays that are written for them: few columns, long rows, wide types."""

from __future__ import annotations

import pytest

from passes.memory.gpu_cycles import H100
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_times import COPY, Times
from passes.memory.operations import Operation, Shape
from tests.passes.memory.device_programs import operation


@pytest.mark.parametrize(("columns", "is_slow"), [(512, True), (2**15, False)])
def test_a_sum_of_few_columns_is_slow(columns: int, is_slow: bool) -> None:
    shape: Shape = (128, columns)
    every = [operation("input", shape=shape), operation("reduce", 0, shape=(columns,), tag=("reduce-sum", (0,)))]
    times = Times(every, ((1,), ()), (True, True), (False, False), H100)
    assert times.is_slow(1) == is_slow
    assert not times.is_slow(0)


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
    times = Times([*parts, joined], ((2,), (2,), ()), (True, True, True), (False, False, False), H100)
    assert times.is_ragged(2) == is_ragged


@pytest.mark.parametrize("tokens", [256, 2**16])
def test_what_is_widened_is_computed_by_all_that_read_it_and_a_large_sum_before_it_is_written(tokens: int) -> None:
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
    written = {kernel.operation for kernel in fuse(every, (6, 8, 10, 11))}
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


def test_writing_gains_less_where_few_blocks_read() -> None:
    def gained(columns: int) -> float:
        shape: Shape = (128, columns)
        every = [
            *(operation("input", shape=shape, tag=i) for i in range(2)),
            operation("elementwise", 0, 1, shape=shape, name="multiply"),
            operation("reduce", 2, shape=(columns,), tag=("reduce-sum", (0,))),
        ]
        readers = ((2,), (2,), (3,), ())
        return Times(every, readers, bytes(4), bytes(4), H100).gains[2] / every[2].nbytes

    assert gained(512) < gained(2**15) == 2.0


def test_what_follows_from_narrower_numbers_gains_more_than_what_is_computed_of_it() -> None:
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
    readers = [[r for r, reader in enumerate(every) if index in reader.operands] for index in range(len(every))]
    times = Times(every, readers, bytearray(len(every)), bytearray(len(every)), H100)
    assert times.gains[2] > times.gains[6]
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
    times = Times(every, ((1,), (2,), (3, 4), (), ()), bytearray(5), bytearray(5), H100)
    assert times.is_copied(2)
    assert not times.is_copied(0)
    assert times.takes[1]
    assert not times.takes[2]
