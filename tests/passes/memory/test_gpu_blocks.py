"""Blocks of kernels on GPUs: sums have few, which read slowly."""

from __future__ import annotations

import pytest

from passes.memory.gpu_blocks import blocks_of, rates_of
from passes.memory.gpu_cycles import H100
from passes.memory.operations import Shape
from tests.passes.memory.device_programs import operation


@pytest.mark.parametrize(
    ("shape", "added", "narrow", "blocks"),
    [
        pytest.param((8, 128, 128, 2), (1,), False, 32, id="columns of float32, two a thread"),
        pytest.param((8, 128, 128, 2), (1,), True, 16, id="columns that read bfloat16, four a thread"),
        pytest.param((128, 128), (1,), False, 16, id="rows, eight a block"),
        pytest.param((128, 128), (0,), False, 2, id="all rows of a matrix"),
        pytest.param((128, 128), (0,), True, 1, id="all rows of a matrix of bfloat16"),
        pytest.param((4, 64, 48), (1,), False, 8, id="columns that no two threads share evenly"),
        pytest.param((4, 16, 64), (1,), False, 2, id="short columns, element by element"),
        pytest.param((8192, 96), (0,), False, 90 * 3, id="long columns, in parts"),
        pytest.param((16, 128, 8), (1,), False, 16, id="few columns beside each other, a block for each group"),
    ],
)
def test_a_sum_has_few_blocks(shape: Shape, added: Shape, narrow: bool, blocks: int) -> None:
    read = operation("input", shape=shape)
    kept = tuple(size for d, size in enumerate(shape) if d not in added)
    made = operation("reduce", 0, shape=kept, tag=("reduce-sum", added))
    assert blocks_of(made, read, narrow=narrow) == blocks


def test_few_blocks_read_slowly_and_what_is_read_again_comes_from_a_cache() -> None:
    assert rates_of(H100, 16 * H100.cores) == pytest.approx((1.0, 1 / 20, 1 / 2.5))
    slow = 3.35e12 / H100.block_bytes_per_second
    assert rates_of(H100, 1) == pytest.approx((slow, slow, slow))
