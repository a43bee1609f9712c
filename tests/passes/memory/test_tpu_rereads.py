"""What XLA:TPU writes since readers would read more if they computed it again, by what libtpu 0.0.42 made for v5e."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from passes.memory.gpu_fusion import kernels_of
from passes.memory.operations import ELEMENTWISE, Operation
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_products import ROUNDED
from passes.memory.tpu_rereads import Rereads
from tests.passes.memory.device_programs import drawn, inside, narrow, operation

TABLE, COLUMNS = (64, 96), (64, 32)
CASES = {(1, 4): 0, (2, 3): 0, (2, 4): 1, (3, 2): 0, (3, 3): 1, (3, 4): 1}
"""(arrays that are added up, products that read their sum) -> whether the sum is written, as of bf16[4096,2048]."""

CHAINS = {(2, 1): 0, (2, 2): 1, (3, 1): 0, (2, 4): 2, (3, 2): 1, (3, 3): 2, (4, 1): 1, (4, 4): 4}
"""(sums, each of the one before and one array more, products that read each) -> how many sums are written."""


class _Program:
    """Operations as they are added, and those that are returned."""

    def __init__(self) -> None:
        self.every: list[Operation] = []
        self.returned: list[int] = []

    def add(self, made: Operation) -> int:
        """The position of an operation."""
        self.every.append(made)
        return len(self.every) - 1

    def given(self, shape: tuple[int, ...] = TABLE) -> int:
        """The position of a new argument."""
        return self.add(narrow("input", shape=shape, tag=len(self.every)))

    def summed(self, arrays: Sequence[int]) -> int:
        """The position of the largest of arrays, element by element."""
        first, *others = arrays
        for other in others:
            first = self.add(narrow("elementwise", first, other, name="maximum"))
        return first

    def multiplied(self, array: int, times: int) -> None:
        """Returns so many products of an array."""
        for _ in range(times):
            made = narrow("dot", array, self.given((96, 32)), shape=COLUMNS, tag=("merged", len(self.every)))
            self.returned.append(self.add(made))

    def written(self, size: int = 64 * 96) -> list[int]:
        """The operations that kernels write of so many elements."""
        made = [kernel.operation for kernel in fuse(self.every, self.returned)]
        return [o for o in made if self.every[o].kind in ("elementwise", "expensive") and self.every[o].size == size]


@pytest.mark.parametrize(("arrays", "products"), CASES)
def test_a_sum_is_written_where_its_readers_would_read_more(arrays: int, products: int) -> None:
    program = _Program()
    summed = program.summed([program.given() for _ in range(arrays)])
    program.multiplied(summed, products)
    assert program.written() == [summed] * CASES[arrays, products]


@pytest.mark.parametrize(("sums", "products"), CHAINS)
def test_of_a_chain_of_sums_those_are_written_that_save_most(sums: int, products: int) -> None:
    program = _Program()
    before = program.given()
    for _ in range(sums):
        before = program.summed((before, program.given()))
        program.multiplied(before, products)
    assert len(program.written()) == CHAINS[sums, products]


@pytest.mark.parametrize("sums", range(2, 6))
def test_kernels_that_add_up_the_same_are_one(sums: int) -> None:
    """As five sums of three arrays, none of which writes what it adds up, and two of which one waits for the other."""
    program = _Program()
    summed = program.summed([program.given() for _ in range(3)])
    wide = program.add(operation("elementwise", summed, shape=TABLE, name="convert bfloat16"))
    added = [
        program.add(operation("reduce", wide, shape=(64,), name="reduce-sum", tag=("reduce-sum", i, (1,))))
        for i in range(sums)
    ]
    program.returned.extend(added)
    assert program.written() == []


@pytest.mark.parametrize(("products", "written"), {3: False, 4: True}.items())
def test_a_narrowed_array_is_written_for_four_readers(products: int, written: bool) -> None:
    program = _Program()
    wide = program.add(operation("input", shape=TABLE, tag=0))
    narrowed = program.add(narrow("expensive", wide, name="convert float32"))
    program.multiplied(narrowed, products)
    assert program.written() == [narrowed] * written


@pytest.mark.parametrize(("products", "written"), {3: False, 4: True}.items())
def test_an_operand_that_products_round_counts_wide_and_is_written_rounded(products: int, written: bool) -> None:
    """As a vision transformer's gradients of scores in float32, which two products read: neither is written."""
    program = _Program()
    arrays = [program.add(operation("input", shape=TABLE, tag=i)) for i in range(2)]
    summed = program.add(operation("elementwise", *arrays, shape=TABLE, name="multiply"))
    rounded = program.add(narrow("expensive", summed, tag=ROUNDED))
    program.multiplied(rounded, products)
    assert program.written() == [rounded] * written


def moved_nbytes(operations: Sequence[Operation], written: bytearray) -> int:
    """The bytes that kernels read and write."""
    kernels = kernels_of(operations, written)
    read = sum(operations[o].nbytes for kernel in kernels for o in inside(kernel, operations)[1])
    return read + sum(operations[kernel.operation].nbytes for kernel in kernels)


@pytest.mark.parametrize("seed", range(60))
def test_no_more_bytes_move_for_what_is_written(seed: int) -> None:
    program = drawn(seed, 60)
    operations = [o._replace(operands=tuple(dict.fromkeys(o.operands))) for o in program.operations]
    readers: list[list[int]] = [[] for _ in operations]
    for index, made in enumerate(operations):
        for o in made.operands:
            readers[o].append(index)
    written = bytearray(
        made.kind != "literal" and (made.kind not in ELEMENTWISE or i in program.outputs or not readers[i])
        for i, made in enumerate(operations)
    )
    before = bytearray(written)
    Rereads(operations, readers, written, [-1] * len(operations)).settle()
    assert all(now or not was for now, was in zip(written, before, strict=True))
    assert moved_nbytes(operations, written) <= moved_nbytes(operations, before)
    assert sum(written) > sum(before) or moved_nbytes(operations, written) == moved_nbytes(operations, before)
