"""The kernels that XLA's GPU compiler fuses operations into, and hence the arrays that are written to memory.

Products, sums, collectives and loops write what they make. What lies between them, elementwise or rearranged, is
computed again in every kernel that reads it where that takes no longer than to write it once and read it in each,
in the order of what is gained so (passes/memory/gpu_priorities.py). So softmax and normalisation leave no copies in a
wider type behind, and small programs hardly any, but a large tanh is written, and so is what would be read by many
kernels as several arrays. A sum of columns has few blocks, which read slowly: what it adds up is written first where
that is less than what it follows from. Longer columns are added in parts, by many blocks.

Reference: XLA's PriorityFusion and GpuPerformanceModel, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from passes.memory.fusion import Kernel
from passes.memory.gpu_cycles import H100, Arithmetic
from passes.memory.gpu_joint_kernels import OPERANDS, joined
from passes.memory.gpu_priorities import TAKES_IN, Contents, Priorities
from passes.memory.gpu_softmax import apart, begun_by
from passes.memory.gpu_times import FUSIBLE, SUM, Times
from passes.memory.operations import DRAWN, ELEMENTWISE, Operation

PURE = frozenset({*ELEMENTWISE, "bitcast"})
RENAMED = frozenset({"bitcast", "part", "result"})
"""Kinds that are another name for an array: XLA writes over what a kernel reads under its own name only."""


def fuse(
    operations: Sequence[Operation], outputs: Iterable[int], *, arithmetic: Arithmetic = H100
) -> tuple[Kernel, ...]:
    """The kernels of a program, in the order of its operations, without those that no output needs."""
    placed = frozenset(outputs)
    fusion = _Fusion(operations, placed, arithmetic)
    contents = fusion.decide()
    kernels = [
        replace(kernel, by_rows=kernel.operation in fusion.rows)
        for kernel in kernels_of(operations, fusion.written, as_listed=True)
    ]
    return joined(operations, kernels, placed, fusion.apart | fusion.rows, fusion.times, contents)


class _Fusion:
    """The kernels that read each operation; `written` are those with a place in memory.

    What a product or a collective reads, or a bitcast that is written, `is_fixed`: it has to be there, and so do the
    `places` that updates and scatters begin with. The kernels of `rows` that operations have `begun` are Triton's.
    """

    def __init__(self, operations: Sequence[Operation], outputs: frozenset[int], arithmetic: Arithmetic) -> None:
        self.operations, self.outputs = operations, outputs
        self.readers: list[list[int]] = [[] for _ in operations]
        self.needed, self.is_fixed = bytearray(len(operations)), bytearray(len(operations))
        self.places: set[int] = set()
        for index in reversed(range(len(operations))):
            operation = operations[index]
            if index in outputs or operation.kind == "input" or self.readers[index]:
                self.needed[index] = True
                is_name = operation.kind == "bitcast" and (index in outputs or self.is_fixed[index])
                for o in operation.operands:
                    self.readers[o].append(index)
                    self.is_fixed[o] |= is_name or operation.kind not in TAKES_IN
                if operation.kind == "update" or _scatters(operation):
                    self.places.add(operation.operands[0])
        self.sums = self._sums()
        self.begun = begun_by(operations, self.readers)
        self.in_rows = frozenset(self.begun)
        self.written = bytearray(len(operations))
        self.apart, self.row_sums = apart(operations, self.readers, self.begun)
        self.rows = set[int]()
        self.times = Times(operations, arithmetic)
        self.draws = any(operation.name == DRAWN for operation in operations)

    def _sums(self) -> bytearray:
        """Flags of the sums of a product's parts, and of what computes one that nothing else reads."""
        flags = bytearray(len(self.operations))
        for index, operation in enumerate(self.operations):
            read = any(flags[o] and len(self.readers[o]) == 1 for o in operation.operands)
            flags[index] = operation.name == SUM or (read and operation.kind in FUSIBLE)
        return flags

    def decide(self) -> Mapping[int, Contents]:
        """The kernels by what they write, once it is decided of every operation whether that is written to memory."""
        begin = (i for i, o in enumerate(self.operations) if self.needed[i] and o.kind != "literal")
        kernels = Priorities(self.times, self.readers, begin, self.begun, self.row_sums, self._may_be_fused).run()
        for root, contents in kernels.items():
            self.written[root] = True
            if not self.in_rows.isdisjoint(contents.inside):
                self.rows.add(root)
        return kernels

    def _may_be_fused(self, index: int, roots: Collection[int], kernels: Mapping[int, Contents]) -> bool:
        """Whether an operation may be computed by all kernels that read it."""
        operation = self.operations[index]
        is_row_sum = index in self.row_sums and not self.in_rows.isdisjoint(kernels[index].inside)
        if not (operation.kind in FUSIBLE or is_row_sum) or index in self.outputs or index in self.places:
            return False
        if index in self.apart or self.is_fixed[index] or (len(roots) > OPERANDS and operation.size == 1):
            return False
        is_sum = self.sums[index] and not operation.is_conversion
        if is_sum and any(not self.in_rows.isdisjoint(kernels[root].inside) for root in roots):
            return False
        if len(roots) == 1:
            return True
        return not (self.times.is_copied(index) or (self.draws and self._is_drawn(index)))

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


def _scatters(operation: Operation) -> bool:
    """Whether an operation adds to places of the array that it reads first."""
    return operation.kind in ("reduce", "update") and operation.name.startswith("scatter")


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
