"""The time of kernels of XLA's GPU compiler, as bytes that memory moves in it.

A kernel takes as long as it reads and writes, or computes. Of what it broadcasts it reads every element again, numbers
too, and what follows from that is computed for every element. With few blocks all of this takes longer, so exponents
that are added up by columns are written first, although as many bytes are read without. What brings dimensions into
another order is computed tile by tile, and by a loop where a side is short: that reads 64 bytes for every element.

Reference: GpuPerformanceModel::EstimateRunTimeForFusion, GpuHloCostAnalysis and CoalescingAnalysis of
xla/service/gpu/model, and TransposeFusion, as of jaxlib 0.10. The times that PriorityFusion writes of the steps of
LLaMA and BERT on A100 and H100 are met to four digits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import cast

from passes.ir import item_nbytes
from passes.memory.gpu_blocks import ADDED, WARP, Rates, blocks_of, rates_of
from passes.memory.gpu_cycles import RAGGED, Arithmetic
from passes.memory.operations import ELEMENTWISE, Operation, Shape

FUSIBLE = frozenset(
    {"elementwise", "expensive", "broadcast", "iota", "bitcast", "transpose", "rearrange", "gather", "literal"}
)
"""Kinds that are computed where they are read."""

SUM, COPY = "sum", "copy in another order"
"""The names of the sum of a product's parts, which no kernel of Triton's computes where it reads it, and of what brings
dimensions into another order in memory: it reads element by element, and so it is written where it has more than one
reader, or what follows from it alone is."""

APART = 0.05
"""The share of computing, or of reading and writing, that does not happen beside the other: one less XLA's
`kMemoryComputeParallelism`."""

WIDE = 4
"""Bytes of an element from which each thread that adds up columns takes two of them, and of narrower ones four."""

SIDE, NARROW_TILE_NBYTES, TILE = 16, 128, 32
"""The elements of a side from which a transpose is made tile by tile, the bytes of a tile's rows of narrow numbers, and
the elements of other ones: XLA's `kMinDimensionToTransposeTiled`, `kBankBitwidth` times its banks, and `kTileSize`."""

SECTOR_NBYTES = 64
"""Bytes that come from memory for one element that lies by itself: XLA's `kDRAMToL2TransactionSizeBytes`."""

UNROLLED, RESIDENT = 4, 2048
"""The elements that each thread of a loop computes where all threads that a multiprocessor holds have one, and these
threads: XLA's `kMaxUnrollFactor`, and CUDA's limit from Volta on, but for 1536 of consumers' GPUs."""


class Turn(IntEnum):
    """The way in which a kernel brings dimensions into another order: not at all, by tiles, or element by element."""

    NONE = 0
    TILED = 1
    LOOP = 2


class Times:
    """The time of kernels of operations on a GPU with this arithmetic.

    `works` are the bytes that memory moves while all multiprocessors compute each, `turns` how it brings dimensions
    into another order, `wholes` the bytes of all elements.
    """

    def __init__(self, operations: Sequence[Operation], arithmetic: Arithmetic) -> None:
        self.operations, self.arithmetic = operations, arithmetic
        self.items = [item_nbytes(operation.dtype) for operation in operations]
        self.sizes = [operation.size for operation in operations]
        self.wholes = [size * item for size, item in zip(self.sizes, self.items, strict=True)]
        self.works = [self._work_nbytes(index) for index in range(len(operations))]
        self.turns = [self._turn(index) for index in range(len(operations))]
        self.rates: dict[tuple[int, bool], tuple[Rates, float]] = {}

    def nbytes(
        self,
        root: int,
        work: float,
        read: Mapping[int, float],
        written_nbytes: int,
        turn: int = Turn.NONE,
        turned: Collection[int] = (),
    ) -> float:
        """The bytes that memory moves in the time of a kernel with the blocks of this root, of so much work, which
        reads so many times of each array, and turns those that are `turned`: a sum does so element by element.
        """
        items, wholes, l1_nbytes = self.items, self.wholes, self.arithmetic.l1_nbytes
        narrow = self.operations[root].kind == "reduce" and any(items[o] < WIDE for o in read)
        rates, idle = self._rates(root, narrow)
        by_elements = turned if self.operations[root].kind == "reduce" else ()
        total = 0.0
        for o, times in read.items():
            whole = wholes[o]
            if times > 1.0:
                again = rates.near if whole < l1_nbytes else rates.far
                total += whole * (rates.first + (times - 1.0) * again)
            elif (turn == Turn.LOOP or o in by_elements) and times == 1.0 and self.sizes[o] > 1:
                total += whole * rates.first * (SECTOR_NBYTES // items[o])
            else:
                total += whole * rates.first * times
        total += written_nbytes
        work *= idle
        return max(total, work) + APART * min(total, work)

    def _work_nbytes(self, index: int) -> float:
        operation, size = self.operations[index], self.sizes[index]
        if operation.kind in ELEMENTWISE:
            return size * self.arithmetic.step_nbytes(operation.name)
        if operation.kind == "reduce":
            return self.sizes[operation.operands[0]] * self.arithmetic.step_nbytes(operation.name)
        return size * self.arithmetic.step_nbytes(RAGGED) if self.is_ragged(index) else 0.0

    def _rates(self, root: int, narrow: bool) -> tuple[Rates, float]:
        """The rates at which the kernel of a root reads, `narrow` where that has 16 bits or fewer, and the times that
        it computes more slowly than all multiprocessors do.
        """
        rates = self.rates.get((root, narrow))
        if rates is None:
            blocks, cores = self._blocks(root, narrow), self.arithmetic.cores
            rates = self.rates[root, narrow] = rates_of(self.arithmetic, blocks), cores / min(blocks, cores)
        return rates

    def _blocks(self, root: int, narrow: bool) -> int:
        if self.turns[root] == Turn.TILED:
            return self._tiles(root)
        operation = self.operations[root]
        first = self.operations[operation.operands[0]] if operation.operands else operation
        blocks = max(1, blocks_of(operation, first, narrow=narrow))
        is_loop = operation.kind != "reduce" or operation.name not in ADDED
        return -(-blocks // UNROLLED) if is_loop and operation.size >= RESIDENT * self.arithmetic.cores else blocks

    def _tiles(self, root: int) -> int:
        """The tiles of what is brought into another order."""
        size, tile = self.sizes[root], max(TILE, NARROW_TILE_NBYTES // self.items[root])
        sides = _sides(self.operations[root], self.operations)
        if sides is None:
            return max(1, size // tile**2)
        first, second = sides
        if min(sides) < TILE:
            tile = TILE
        return max(1, size // (first * second)) * -(-first // tile) * -(-second // tile)

    def _turn(self, index: int) -> Turn:
        operation = self.operations[index]
        if operation.kind == "rearrange" and operation.name == COPY:
            _, order, *_ = (*cast("tuple[object, ...]", operation.tag), None)
            return Turn.LOOP if isinstance(order, tuple) else Turn.TILED
        sides = _sides(operation, self.operations)
        if sides is None:
            return Turn.NONE
        return Turn.TILED if min(sides) >= SIDE else Turn.LOOP

    def is_copied(self, index: int) -> bool:
        """Whether an operation follows from a copy in another order alone."""
        while (operation := self.operations[index]).kind in FUSIBLE and len(operation.operands) == 1:
            if operation.name == COPY:
                return True
            (index,) = operation.operands
        return False

    def is_ragged(self, index: int) -> bool:
        """Whether an operation joins arrays at places where threads of a warp part: all of it is then computed twice,
        and XLA counts much more than that.
        """
        operation = self.operations[index]
        if operation.kind != "rearrange" or operation.name != "concatenate":
            return False
        _, dimension = cast("tuple[str, int]", operation.tag)
        shapes = [self.operations[o].shape for o in operation.operands]
        is_along = 0 < dimension < len(operation.shape)
        return is_along and any(len(s) < len(operation.shape) or s[dimension] % WARP for s in shapes)


def _sides(operation: Operation, operations: Sequence[Operation]) -> tuple[int, int] | None:
    """The elements beside each other before and behind a transpose that changes which these are, else None."""
    if operation.kind != "transpose":
        return None
    read = operations[operation.operands[0]].shape
    wide = [d for d in cast("Shape", operation.tag) if read[d] > 1]
    if not wide or wide[-1] == max(wide):
        return None
    return read[max(wide)], read[wide[-1]]
