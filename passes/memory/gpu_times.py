"""The time of kernels of XLA's GPU compiler, as bytes that memory moves in it, where sums have few blocks.

A kernel takes as long as it reads and writes, or computes. Of what it broadcasts it reads every element again, numbers
too, and what follows from that is computed for every element. With few blocks all of this takes longer, so exponents
that are added up by columns are written first, although as many bytes are read without.

Reference: GpuPerformanceModel::EstimateRunTimeForFusion and GpuHloCostAnalysis of xla/service/gpu/model, with constants
that PriorityFusion takes in last, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

from passes.ir import item_nbytes
from passes.memory.gpu_blocks import ADDED, WARP, blocks_of, read_nbytes
from passes.memory.gpu_cycles import RAGGED, Arithmetic
from passes.memory.operations import ELEMENTWISE, Operation

FUSIBLE = frozenset(
    {"elementwise", "expensive", "broadcast", "iota", "bitcast", "transpose", "rearrange", "gather", "literal"}
)
"""Kinds that are computed where they are read."""

WIDE = 4
"""Bytes of an element from which each thread that adds up columns takes two of them, and of narrower ones four."""


@dataclass(frozen=True, slots=True)
class Times:
    """The kernels of operations while it is decided which of them are `written`, given the `readers` of each; those
    that are `is_fixed` have to be.
    """

    operations: Sequence[Operation]
    readers: Sequence[Sequence[int]]
    written: Sequence[int]
    is_fixed: Sequence[int]
    arithmetic: Arithmetic

    def is_slow(self, root: int) -> bool:
        """Whether a kernel sums with fewer blocks than there are multiprocessors."""
        operation = self.operations[root]
        if operation.kind != "reduce" or operation.name not in ADDED:
            return False
        read = self.operations[operation.operands[0]]
        return blocks_of(operation, read, narrow=True) < self.arithmetic.cores

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

    def is_computed_again(self, index: int, roots: Collection[int]) -> bool:
        """Whether an operation is computed in every kernel that reads it where some of these have few blocks."""
        below = index if len(roots) == 1 else 0
        again = sum(self._kernel_nbytes(root, below=below) for root in roots)
        once = self._kernel_nbytes(index, below=below) + self.arithmetic.launch_nbytes
        return again <= once + sum(self._kernel_nbytes(root, index, below=below) for root in roots)

    def _kernel_nbytes(self, root: int, alone: int = -1, *, below: int = 0) -> float:
        """The bytes that memory moves in the time of a kernel, which reads the operation `alone` from there, and those
        before `below` that have several readers: what one kernel alone reads is fused before it is decided of them.
        """
        computed, read = self._inside(root, alone, below)
        described = self.operations[root]
        first = self.operations[described.operands[0]] if described.operands else described
        narrow = any(item_nbytes(self.operations[o].dtype) < WIDE for _, o in read)
        blocks = blocks_of(described, first, narrow=narrow)
        work = sum(self._steps_nbytes(index, elements, blocks) for index, elements in computed.items())
        once = [self.operations[o].nbytes for _, o in read]
        every = [elements * item_nbytes(self.operations[o].dtype) for (_, o), elements in read.items()]
        return max(read_nbytes(self.arithmetic, blocks, once, every) + described.nbytes, work)

    def _inside(self, root: int, alone: int, below: int) -> tuple[dict[int, int], dict[tuple[int, int], int]]:
        """The elements that a kernel computes of its operations, and those that it reads of arrays and numbers: of a
        number by every reader of it.
        """
        computed = {root: self.operations[root].size}
        read, pending = dict[tuple[int, int], int](), [-root]
        while pending:
            index = -heapq.heappop(pending)
            operation = self.operations[index]
            elements = computed[index]
            for o in dict.fromkeys(operation.operands):
                described = self.operations[o]
                n_elements = described.size if operation.kind == "reduce" else elements
                is_inside = described.kind in FUSIBLE and not self.written[o] and not self.is_fixed[o]
                is_shared = o < below and len(self.readers[o]) > 1
                if o == alone or described.kind == "literal" or not is_inside or is_shared:
                    key = (index if described.size == 1 else -1, o)
                    read[key] = max(read.get(key, 0), n_elements)
                    continue
                if o not in computed:
                    heapq.heappush(pending, -o)
                computed[o] = max(computed.get(o, 0), n_elements)
        return computed, read

    def _steps_nbytes(self, index: int, elements: int, blocks: int) -> float:
        """The bytes that memory moves while a kernel of so many blocks computes elements of an operation."""
        operation = self.operations[index]
        if self.is_ragged(index):
            return elements * self.arithmetic.computed_nbytes(RAGGED, blocks)
        if operation.kind not in (*ELEMENTWISE, "reduce"):
            return 0.0
        added = self.operations[operation.operands[0]].size if operation.kind == "reduce" else elements
        return added * self.arithmetic.computed_nbytes(operation.name, blocks)
