"""The time of kernels of XLA's GPU compiler, as bytes that memory moves in it, where sums have few blocks.

A kernel takes as long as it reads and writes, or computes. Of what it broadcasts it reads every element again, numbers
too, and what follows from that is computed for every element. With few blocks all of this takes longer, so exponents
that are added up by columns are written first, although as many bytes are read without.

Reference: GpuPerformanceModel::EstimateRunTimeForFusion and GpuHloCostAnalysis of xla/service/gpu/model, with constants
that PriorityFusion takes in last, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from passes.ir import item_nbytes
from passes.memory.gpu_blocks import ADDED, WARP, blocks_of, read_nbytes
from passes.memory.gpu_cycles import RAGGED, Arithmetic
from passes.memory.operations import ELEMENTWISE, Operation

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

UNREAD = frozenset({"broadcast", "iota", "literal"})
"""Kinds that are read in hardly any time: they are the same along a dimension."""

WIDE = 4
"""Bytes of an element from which each thread that adds up columns takes two of them, and of narrower ones four."""


class Times:
    """The kernels of operations while it is decided which of them are `written`, given the `readers` of each; those
    that are `is_fixed` have to be.

    Kernels of `rows` read the sums of `parts` of products from memory. `steps` are the bytes that memory moves while
    all multiprocessors compute an element, `gains` about those that are not moved where an operation is computed by all
    that read it: of those `source_nbytes` are read, since what has one reader is computed there first. XLA begins with
    what gains most: of what comes before an operation of which it is decided, what gains more is computed already, what
    gains less is read from memory, and so is what follows from a copy in another order and has several readers.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        readers: Sequence[Sequence[int]],
        written: Sequence[int],
        is_fixed: Sequence[int],
        arithmetic: Arithmetic,
    ) -> None:
        self.operations, self.readers, self.arithmetic = operations, readers, arithmetic
        self.written, self.is_fixed = written, is_fixed
        self.items = [item_nbytes(operation.dtype) for operation in operations]
        self.sizes = [operation.size for operation in operations]
        self.takes = [
            operation.kind in FUSIBLE
            and operation.kind != "literal"
            and not (len(readers[index]) > 1 and self.is_copied(index))
            for index, operation in enumerate(operations)
        ]
        self.sums = [operation.kind == "reduce" for operation in operations]
        self.rows, self.parts = set[int](), bytearray(len(operations))
        self.steps = [self._step_nbytes(index) for index in range(len(operations))]
        self.source_nbytes = [0] * len(operations)
        self.gains = [self._gained_nbytes(index) for index in range(len(operations))]

    def _step_nbytes(self, index: int) -> float:
        operation = self.operations[index]
        if self.is_ragged(index):
            return self.arithmetic.step_nbytes(RAGGED)
        return self.arithmetic.step_nbytes(operation.name) if operation.kind in (*ELEMENTWISE, "reduce") else 0.0

    def _gained_nbytes(self, index: int) -> float:
        operation, read = self.operations[index], 0
        for o in set(operation.operands):
            if self.takes[o] and len(self.readers[o]) == 1 and not self.is_fixed[o]:
                read += self.source_nbytes[o]
            elif self.operations[o].kind not in UNREAD:
                read += self.operations[o].nbytes
        self.source_nbytes[index] = read
        times = sum(self._idle(reader) for reader in self.readers[index])
        return read + operation.nbytes + times * (operation.nbytes - read)

    def _idle(self, reader: int) -> float:
        """The times that an operation reads more slowly than memory could, since few blocks do it."""
        operation = self.operations[reader]
        if operation.kind != "reduce" or operation.name not in ADDED:
            return 1.0
        blocks = blocks_of(operation, self.operations[operation.operands[0]], narrow=True)
        return max(1.0, self.arithmetic.bytes_per_second / (max(1, blocks) * self.arithmetic.block_bytes_per_second))

    def is_copied(self, index: int) -> bool:
        """Whether an operation follows from a copy in another order alone."""
        while (operation := self.operations[index]).kind in FUSIBLE and len(operation.operands) == 1:
            if operation.name == COPY:
                return True
            (index,) = operation.operands
        return False

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
        """Whether an operation is computed in every kernel that reads it."""
        again = sum(self._kernel_nbytes(root, index) for root in roots)
        once = sum(self._kernel_nbytes(root, index, alone=index) for root in roots)
        return again <= once + self._kernel_nbytes(index, index) + self.arithmetic.launch_nbytes

    def _kernel_nbytes(self, root: int, undecided: int, alone: int = -1) -> float:
        """The bytes that memory moves in the time of a kernel while it is `undecided` of an operation, and of those
        before; the kernel reads the operation `alone` from memory.
        """
        work, read = self._inside(root, undecided, alone)
        return self.nbytes(root, work, read, self.operations[root].nbytes)

    def nbytes(self, root: int, work: float, read: Mapping[tuple[int, int], float], written_nbytes: int) -> float:
        """The bytes that memory moves in the time of a kernel with the blocks of this root."""
        described = self.operations[root]
        first = self.operations[described.operands[0]] if described.operands else described
        narrow = any(self.items[o] < WIDE for _, o in read)
        blocks = blocks_of(described, first, narrow=narrow)
        once = [self.operations[o].nbytes for _, o in read]
        every = [elements * self.items[o] for (_, o), elements in read.items()]
        moved = read_nbytes(self.arithmetic, blocks, once, every) + written_nbytes
        work *= self.arithmetic.cores / max(1, min(blocks, self.arithmetic.cores))
        return max(moved, work) + APART * min(moved, work)

    def contents(self, root: int) -> tuple[float, dict[tuple[int, int], int]]:
        """The bytes that memory moves while all multiprocessors compute a kernel's operations once all is decided, and
        the elements that it reads.
        """
        return self._inside(root, -1, -1)

    def _inside(self, root: int, undecided: int, alone: int) -> tuple[float, dict[tuple[int, int], int]]:
        """The bytes that memory moves while all multiprocessors compute a kernel's operations, and the elements that it
        reads of arrays and numbers: of a number by every reader of it.
        """
        operations, sizes, steps, gains = self.operations, self.sizes, self.steps, self.gains
        computed, pending = {root: sizes[root]}, [-root]
        work, read, gained = 0.0, dict[tuple[int, int], int](), gains[undecided]
        is_rows = root in self.rows
        while pending:
            index = -heapq.heappop(pending)
            elements, operands = computed[index], operations[index].operands
            if self.sums[index]:
                elements = sizes[operands[0]]
            elif operations[index].name == SUM:
                elements *= sizes[operands[0]] // sizes[index]
            work += steps[index] * elements
            for o in operands:
                is_inside = self.takes[o] and o != alone and not self.written[o] and not self.is_fixed[o]
                if is_rows and self.parts[o]:
                    is_inside = False
                if is_inside and (o >= undecided or gains[o] > gained or len(self.readers[o]) == 1):
                    if o not in computed:
                        heapq.heappush(pending, -o)
                    computed[o] = max(computed.get(o, 0), elements)
                    continue
                key = (index if sizes[o] == 1 else -1, o)
                read[key] = max(read.get(key, 0), elements)
        return work, read
