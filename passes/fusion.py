"""Which operations XLA's CPU compiler makes one kernel of: what is never written to memory, and what is, once or twice.

Two passes, as XLA has them. First every large sum or maximum takes in what it alone reads, and what alone reads it
(`library`). Then, from the last operation to the first, every operation takes in the producers that may be computed
again where they are read (`loops`): any cheap one, an expensive one only if nobody else reads it and no element is
needed twice. A producer of several large operands whose readers cannot all take it in is written to memory for all.

Reference: xla/service/instruction_fusion.cc, xla/service/cpu/cpu_instruction_fusion.cc and
xla/backends/cpu/transforms/library_rewriter.cc, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from passes.operations import Operation

PRODUCERS = frozenset(
    {"elementwise", "expensive", "broadcast", "iota", "bitcast", "transpose", "rearrange", "gather", "reduce"}
)
ELEMENTWISE = frozenset({"elementwise", "expensive"})
LIBRARY_ELEMENTS = 4096
LIBRARY_DTYPES = frozenset({"float32", "float64"})
LIBRARY_NAMES = frozenset(
    "abs add add_any ceil cos div erf exp expm1 floor log log1p max min mul neg pow round rsqrt sign sin sqrt square "
    "sub tan tanh".split()
)
LIBRARY_SHAPES = frozenset({"bitcast", "broadcast", "transpose", "iota"})
SEARCHED = 256
"""How many operations between a producer and its reader are looked at, before they count as in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What is run at once and writes one array, that of `operation`.

    `reads` are the operations that it reads from memory, `over` those of them that it may write its result over.
    """

    operation: int
    reads: tuple[int, ...]
    over: tuple[int, ...]


def fuse(operations: Sequence[Operation], outputs: Iterable[int]) -> tuple[Kernel, ...]:
    """The kernels of a program, in the order of its operations; without what no output needs."""
    fusion = _Fusion(operations, frozenset(outputs))
    fusion.library()
    fusion.loops()
    return fusion.kernels()


class _Fusion:
    """Who reads what, as kernels grow; `members` are those of library kernels, by the operation they write."""

    def __init__(self, operations: Sequence[Operation], outputs: frozenset[int]) -> None:
        self.operations = operations
        self.outputs = outputs
        needed = _needed(operations, outputs)
        self.alive = [i in needed for i in range(len(operations))]
        self.reads: list[dict[int, bool]] = []
        self.readers: list[set[int]] = [set() for _ in operations]
        for index, operation in enumerate(operations):
            pure = operation.kind in ELEMENTWISE
            self.reads.append({o: pure for o in operation.operands if operations[o].kind != "literal"})
            if self.alive[index]:
                for o in self.reads[index]:
                    self.readers[o].add(index)
        for index in outputs:
            self.readers[index].add(-1)
        self.fixed: set[int] = set()

    def library(self) -> None:
        """Sums and maxima with what surrounds them."""
        for index in reversed(range(len(self.operations))):
            operation = self.operations[index]
            if self.alive[index] and operation.kind == "reduce" and index not in self.fixed and self._large(operation):
                self._grow(index)

    def _grow(self, index: int) -> None:
        members, root, changed = {index}, index, True
        while changed:
            changed = False
            for member in sorted(members, reverse=True):
                for o in self.reads[member]:
                    if o not in members and self.readers[o] <= members and self._supported(o):
                        members.add(o)
                        changed = True
            if len(self.readers[root]) == 1 and (reader := min(self.readers[root])) >= 0 and self._supported(reader):
                members.add(reader)
                root, changed = reader, True
        outside = dict.fromkeys((o for m in sorted(members) for o in self.reads[m] if o not in members), False)
        for member in members:
            for o in self.reads[member]:
                self.readers[o].discard(member)
            self.alive[member] = member == root
        self.reads[root] = outside
        for o in outside:
            self.readers[o].add(root)
        self.fixed.add(root)

    def _supported(self, index: int) -> bool:
        operation = self.operations[index]
        if index in self.fixed or not self.alive[index]:
            return False
        if operation.kind in LIBRARY_SHAPES:
            return operation.dtype in LIBRARY_DTYPES or operation.dtype == "int32"
        if operation.kind == "rearrange":
            return operation.name == "pad"
        known = operation.name in LIBRARY_NAMES or operation.name.startswith(("power", "convert"))
        return operation.kind in ELEMENTWISE and known and self._large(operation)

    def _large(self, operation: Operation) -> bool:
        """Whether the library is worth its overhead, and has the types."""
        around = (operation, *(self.operations[o] for o in operation.operands))
        return max(o.size for o in around) >= LIBRARY_ELEMENTS and all(o.dtype in LIBRARY_DTYPES for o in around)

    def loops(self) -> None:
        """Every operation with the producers that it computes itself."""
        single = self._single()
        for index in reversed(range(len(self.operations))):
            if self.alive[index] and self._consumes(index):
                self._take_in(index, single)

    def _consumes(self, index: int) -> bool:
        kind = self.operations[index].kind
        return index not in self.fixed and kind in PRODUCERS

    def _produces(self, index: int) -> bool:
        return index not in self.fixed and self.operations[index].kind in PRODUCERS

    def _take_in(self, index: int, single: set[int]) -> None:
        reads, reused = self.reads[index], self._reused(index)
        queue = [-o for o in reads]
        heapq.heapify(queue)
        while queue:
            producer = -heapq.heappop(queue)
            if not self._fusible(producer, index, reused) or producer in single:
                continue
            pure = reads.pop(producer) and self.operations[producer].kind in ELEMENTWISE
            self.readers[producer].discard(index)
            if producer in reused:
                reused.update(self.reads[producer])
            else:
                reused |= self._reused(producer)
            for o in self.reads[producer]:
                if o not in reads:
                    heapq.heappush(queue, -o)
                    self.readers[o].add(index)
                reads[o] = reads.get(o, True) and pure
            if not self.readers[producer]:
                self.alive[producer] = False
                for o in self.reads[producer]:
                    self.readers[o].discard(producer)

    def _fusible(self, producer: int, consumer: int, reused: set[int]) -> bool:
        if not self._produces(producer):
            return False
        if self.operations[producer].kind in ("expensive", "gather", "reduce"):
            return self.readers[producer] == {consumer} and producer not in reused
        return True

    def _reused(self, index: int) -> set[int]:
        """The operands whose elements an operation reads more than once."""
        kind, reads = self.operations[index].kind, self.reads[index]
        if kind == "broadcast":
            return set(reads)
        return set(list(reads)[1:]) if kind in ("gather", "rearrange") else set()

    def _single(self) -> set[int]:
        """Producers of several large operands that are written to memory, since not all readers can take them in."""
        found: set[int] = set()
        for index in reversed(range(len(self.operations))):
            if not self.alive[index] or len(self.readers[index]) < 2 or not self._produces(index):
                continue
            operation = self.operations[index]
            rank = _rank(operation)
            large = [
                o
                for o in self.reads[index]
                if self.operations[o].kind not in ("broadcast", "iota") and _rank(self.operations[o]) >= rank
            ]
            read = sum(self.operations[o].size for o in self.reads[index])
            if len(large) <= 1 or read <= operation.size:
                continue
            if not all(self._on_all_paths(index, reader, found) for reader in self.readers[index]):
                found.add(index)
        return found

    def _on_all_paths(self, producer: int, reader: int, found: set[int]) -> bool:
        """Whether a reader can take in the producer and everything between them."""
        left, pending, seen = SEARCHED, [reader], {reader}
        while pending:
            current = pending.pop()
            if current < 0 or not self._consumes(current):
                return False
            for o in self.reads[current]:
                if o < producer or o in seen or not self._reaches(producer, o):
                    continue
                if o in found or not self._fusible(o, current, self._reused(current)):
                    return False
                left -= 1
                if left == 0:
                    return False
                if o != producer:
                    seen.add(o)
                    pending.append(o)
        return True

    def _reaches(self, producer: int, index: int) -> bool:
        pending, seen = [index], {index}
        while pending:
            current = pending.pop()
            if current == producer or len(seen) > SEARCHED:
                return True
            for o in self.reads[current]:
                if o >= producer and o not in seen:
                    seen.add(o)
                    pending.append(o)
        return False

    def kernels(self) -> tuple[Kernel, ...]:
        """What is left, each with what it reads."""
        return tuple(
            Kernel(
                operation=index,
                reads=tuple(sorted(self.reads[index])),
                over=tuple(o for o, pure in sorted(self.reads[index].items()) if pure),
            )
            for index in range(len(self.operations))
            if self.alive[index] and self.operations[index].kind != "literal"
        )


def _rank(operation: Operation) -> int:
    return sum(size > 1 for size in operation.shape)


def _needed(operations: Sequence[Operation], outputs: Iterable[int]) -> set[int]:
    needed = set(outputs)
    pending = list(needed)
    while pending:
        for o in operations[pending.pop()].operands:
            if o not in needed:
                needed.add(o)
                pending.append(o)
    return needed | {i for i, operation in enumerate(operations) if operation.kind == "input"}
