"""The kernels that XLA's GPU compiler fuses operations into, and hence the arrays that are written to memory.

Products, sums, collectives and loops write what they make. What lies between them, elementwise or rearranged, is
computed again in every kernel that reads it where that takes no longer than to write it once and read it in each: time
is counted as the bytes that memory moves in it, a launch's and, where it is longer than that of a kernel's own bytes,
computing's, too. Behind that, what else a kernel reads is hidden: the tanh of a GELU in float32 is computed again on
H100, and written in bfloat16. So softmax and normalisation leave no copies in a wider type behind, and small programs
hardly any, but a large tanh is written. A sum of columns has few blocks, which read slowly: what it adds up is written
first where that is less than what it follows from. Longer columns are added in parts, by many blocks.

Reference: XLA's PriorityFusion and GpuPerformanceModel, as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

from passes.memory.fusion import Kernel
from passes.memory.gpu_blocks import ADDED, COLUMN
from passes.memory.gpu_cycles import H100, Arithmetic
from passes.memory.gpu_joint_kernels import OPERANDS, joined
from passes.memory.gpu_softmax import apart, begun_by
from passes.memory.gpu_times import FUSIBLE, SUM, Times
from passes.memory.operations import DRAWN, ELEMENTWISE, Operation, Shape

PURE = frozenset({*ELEMENTWISE, "bitcast"})
TAKES_IN = frozenset({*FUSIBLE, "reduce", "update"})
"""Kinds whose kernels compute what they read."""

RENAMED = frozenset({"bitcast", "part", "result"})
"""Kinds that are another name for an array: XLA writes over what a kernel reads under its own name only."""


def fuse(
    operations: Sequence[Operation], outputs: Iterable[int], *, arithmetic: Arithmetic = H100
) -> tuple[Kernel, ...]:
    """The kernels of a program, in the order of its operations, without those that no output needs."""
    placed = frozenset(outputs)
    fusion = _Fusion(operations, placed, arithmetic)
    fusion.decide()
    kernels = kernels_of(operations, fusion.written, as_listed=True)
    return joined(operations, kernels, placed, fusion.apart | fusion.rows, fusion.times)


class _Fusion:
    """The kernels that read each operation, from the last to the first; `written` are those with a place in memory.

    What a product or a collective reads, or a bitcast that is written, `is_fixed`: it has to be there, and so do the
    `places` that updates and scatters begin with. The kernels of `rows` that operations have `begun` are Triton's.
    """

    def __init__(self, operations: Sequence[Operation], outputs: frozenset[int], arithmetic: Arithmetic) -> None:
        self.operations, self.outputs, self.arithmetic = operations, outputs, arithmetic
        self.sizes = [operation.nbytes for operation in operations]
        self.readers: list[list[int]] = [[] for _ in operations]
        self.needed, self.is_fixed = bytearray(len(operations)), bytearray(len(operations))
        self.places: set[int] = set()
        for index in reversed(range(len(operations))):
            operation = operations[index]
            if index in outputs or operation.kind == "input" or self.readers[index]:
                self.needed[index] = True
                for o in operation.operands:
                    self.readers[o].append(index)
                    self.is_fixed[o] |= operation.kind not in TAKES_IN
                if operation.kind == "update" or _scatters(operation):
                    self.places.add(operation.operands[0])
        self.sums = self._sums()
        self.begun, self.rows = begun_by(operations, self.readers), set[int]()
        self.written, self.spread = bytearray(len(operations)), bytearray(len(operations))
        self.roots: list[frozenset[int]] = [frozenset()] * len(operations)
        self.apart = apart(operations, self.readers)
        self.times = Times(operations, self.readers, self.written, self.is_fixed, arithmetic)
        self.times.rows, self.times.parts = self.rows, self.sums
        self.draws = any(operation.name == DRAWN for operation in operations)

    def _sums(self) -> bytearray:
        """Flags of the sums of a product's parts, and of what computes one that nothing else reads."""
        flags = bytearray(len(self.operations))
        for index, operation in enumerate(self.operations):
            read = any(flags[o] and len(self.readers[o]) == 1 for o in operation.operands)
            flags[index] = operation.name == SUM or (read and operation.kind in FUSIBLE)
        return flags

    def decide(self) -> None:
        """Decides of every operation whether it is written to memory."""
        for index in reversed(range(len(self.operations))):
            if not self.needed[index]:
                continue
            roots: set[int] = set()
            for reader in self.readers[index]:
                roots |= {reader} if self.written[reader] else self.roots[reader]
            self.roots[index], self.spread[index] = frozenset(roots), self._is_spread(index)
            self.written[index] = not self._is_fused(index, roots)
            if index in self.begun:
                self.rows |= {self.begun[index], *((index,) if self.written[index] else roots)}
            if self.operations[index].kind == "bitcast" and self.written[index]:
                for o in self.operations[index].operands:
                    self.is_fixed[o] = True

    def _is_fused(self, index: int, roots: set[int]) -> bool:
        operation = self.operations[index]
        if operation.kind == "literal":
            return True
        if operation.kind not in FUSIBLE or index in self.outputs or not roots:
            return False
        if index in self.places or index in self.apart or self.is_fixed[index]:
            return False
        if self.sums[index] and not operation.is_conversion and not self.rows.isdisjoint(roots):
            return False
        if len(roots) > OPERANDS and operation.size == 1:
            return False
        if len(roots) > 1 and (self.times.is_copied(index) or (self.draws and self._is_drawn(index))):
            return False
        adds = len(roots) == 1 and _adds_columns(min(roots), self.operations)
        is_timed = operation.kind in ELEMENTWISE and (adds or any(map(self.times.is_slow, roots)))
        is_timed |= operation.name == SUM or (
            operation.kind in ELEMENTWISE and operation.size > 1 and bool(self.spread[index])
        )
        if is_timed or self.times.is_ragged(index):
            return self.times.is_computed_again(index, roots)
        if len(roots) == 1 or operation.kind == "bitcast":  # another name for its operand, whoever reads it
            return True
        read = sum(self._source_nbytes(o) for o in set(operation.operands))
        work = self._work_nbytes(index)
        beside = [self.sizes[root] for root in roots]
        if any(nbytes + read < work for nbytes in beside):
            return self._is_computed_again(index, roots, work)
        again = sum(nbytes + read for nbytes in beside)
        once = max(read + self.sizes[index], work) + sum(nbytes + self.sizes[index] for nbytes in beside)
        return again <= once + self.arithmetic.launch_nbytes

    def _is_spread(self, index: int) -> bool:
        """Whether an operation on elements is broadcast, itself or in what follows from it, where it is read: each of
        its elements is computed for many.
        """
        size = self.operations[index].size
        for reader in self.readers[index]:
            described = self.operations[reader]
            if described.kind == "broadcast" and described.size > size:
                return True
            if self.spread[reader] and described.size == size and not self.written[reader]:
                return True
        return False

    def _is_computed_again(self, index: int, roots: set[int], work: float) -> bool:
        """Whether an operation of so much work is computed in every kernel that reads it, all that these read counted:
        a kernel reads while it computes.
        """
        size, sources = self.sizes[index], self._sources(index)
        again, once = 0.0, max(self._sum_nbytes(sources) + size, work) + self.arithmetic.launch_nbytes
        for root in roots:
            beside = self._sources(root, without=index)
            again += max(self.sizes[root] + self._sum_nbytes(beside | sources), work)
            once += self.sizes[root] + self._sum_nbytes(beside) + size
        return again <= once

    def _sources(self, index: int, without: int = -1) -> set[int]:
        """The arrays that a kernel with this root reads, but for those that it reads for one operation alone."""
        sources, seen, pending = set[int](), {without}, list(self.operations[index].operands)
        while pending:
            if (o := pending.pop()) in seen:
                continue
            seen.add(o)
            if self.written[o] or self.is_fixed[o] or self.operations[o].kind not in FUSIBLE:
                sources.add(o)
            else:
                pending.extend(self.operations[o].operands)
        return sources

    def _sum_nbytes(self, arrays: Iterable[int]) -> int:
        return sum(self.sizes[o] for o in arrays)

    def _is_drawn(self, index: int) -> bool:
        """Whether an operation follows from random bits and numbers alone: its hundred steps take longer than to read
        what they make.
        """
        while (operation := self.operations[index]).kind in FUSIBLE and operation.name != DRAWN:
            read = [o for o in operation.operands if not self._is_number(o)]
            if len(read) != 1:
                return False
            (index,) = read
        return operation.name == DRAWN

    def _is_number(self, index: int) -> bool:
        """Whether an operation is the same number everywhere."""
        operation = self.operations[index]
        (source, *_) = operation.operands or (index,)
        return self.operations[source if operation.kind == "broadcast" else index].kind == "literal"

    def _work_nbytes(self, index: int) -> float:
        """Bytes that memory moves while a kernel computes an operation and what it alone follows from."""
        work, operation = 0.0, self.operations[index]
        while operation.kind in FUSIBLE:
            work += self.arithmetic.nbytes(operation.name) * operation.size
            if len(operation.operands) != 1 or len(self.readers[index := operation.operands[0]]) > 1:
                break
            operation = self.operations[index]
        return work

    def _source_nbytes(self, index: int) -> int:
        """Bytes that a kernel reads for an operand: of the narrowest array that it follows from alone, or of parts that
        it adds.
        """
        least = self.sizes[index]
        while (operation := self.operations[index]).kind in FUSIBLE and len(operation.operands) == 1:
            is_sum, index = operation.name == SUM, operation.operands[0]
            if is_sum:
                return self.sizes[index]
            least = min(least, self.sizes[index])
        return 0 if self.operations[index].kind in ("literal", "iota") else least


def _scatters(operation: Operation) -> bool:
    """Whether an operation adds to places of the array that it reads first."""
    return operation.kind in ("reduce", "update") and operation.name.startswith("scatter")


def _adds_columns(index: int, operations: Sequence[Operation]) -> bool:
    """Whether an operation adds up along other dimensions than the last, in one go."""
    operation = operations[index]
    if operation.kind != "reduce" or operation.name not in ADDED:
        return False
    _, added = cast("tuple[str, Shape]", operation.tag)
    shape = operations[operation.operands[0]].shape
    return len(shape) - 1 not in added and math.prod(shape[d] for d in added) <= COLUMN


def kernels_of(
    operations: Sequence[Operation], written: Sequence[int], *, as_listed: bool = False
) -> tuple[Kernel, ...]:
    """The kernels of the operations that are `written`, by flags, each with what it reads.

    That is in the order of the program, or `as_listed`: as XLA lists the operands of a kernel, which a post-order
    follows. What is taken in lists what it reads last (HloFusionInstruction::FuseInstruction).

    XLA writes a softmax beside its exponents: what reads a sum is not written over what was summed. It scatters into
    the array itself.
    """
    kernels: list[Kernel] = []
    sums: dict[int, list[int]] = {}
    for index in range(len(operations)):
        if written[index]:
            reads = _reads(operations, written, index)
            ordered = tuple(reads) if as_listed else tuple(sorted(reads))
            into = operations[index].operands[:1] if _scatters(operations[index]) else ()
            over = tuple([o for o in ordered if (reads[o] or o in into) and operations[o].kind not in RENAMED])
            if operations[index].kind == "reduce":
                for o in ordered:
                    sums.setdefault(o, []).append(index)
            else:
                rows = [o for o in over if o in sums and not _scatters(operations[o])]
                beside = {o for o in rows if not reads.keys().isdisjoint(sums[o])}
                over = tuple([o for o in over if o not in beside])
            kernels.append(Kernel(operation=index, reads=ordered, over=over))
    return tuple(kernels)


def _reads(operations: Sequence[Operation], written: Sequence[int], root: int) -> dict[int, bool]:
    """The arrays in memory that a kernel reads, and whether it may write over each."""
    operation = operations[root]
    pure = operation.kind in ELEMENTWISE or (operation.kind == "collective" and operation.name == "all_reduce")
    reads = {o: pure for o in operation.operands if written[o]}
    pending, seen = [(o, pure) for o in operation.operands if not written[o]], set[tuple[int, bool]]()
    for read in pending:
        if read in seen:
            continue
        seen.add(read)
        index, is_pure = read
        operation = operations[index]
        below = is_pure and operation.kind in PURE
        for o in operation.operands:
            if written[o]:
                reads[o] = below and reads.get(o, True)
            else:
                pending.append((o, below))
    return reads
