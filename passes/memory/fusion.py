"""The kernels that XLA's CPU compiler fuses operations into, and hence the arrays that are written to memory.

Two passes, as XLA has them. First every large sum or maximum takes in what it alone reads, products of matrices too,
and what alone reads it (`_Library`). Then, from the last operation to the first, every operation takes in the producers
that may be computed again where they are read (`_Loops`): any cheap one, an expensive one only if nobody else reads it
and no element is needed twice, and none that a kernel would repeat too often in its code. A producer of several large
operands whose readers cannot all take it in is written to memory for all.

Which reader of an array runs first depends on what fusion does to the list of them: what takes an operation in is added
at the end for what that reads, and where an operation goes, the last of the list takes its place.

Reference: HloInstruction::Users of xla/hlo/ir/hlo_instruction.cc, xla/service/instruction_fusion.cc,
xla/service/cpu/cpu_instruction_fusion.cc and
xla/backends/cpu/transforms/library_rewriter.cc, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from passes.memory import windows
from passes.memory.code_duplication import Copies
from passes.memory.operations import ELEMENTWISE, Operation

PRODUCERS = frozenset(
    {"elementwise", "expensive", "broadcast", "iota", "bitcast", "transpose", "rearrange", "gather", "reduce"}
)
ONCE = frozenset({"expensive", "gather", "reduce"})
REPEATING = frozenset({"broadcast", "gather", "rearrange"})
LIBRARY_ELEMENTS = 4096
"""Elements from which XLA's CPU compiler hands a group of operations to its library of kernels, as of jaxlib 0.10."""

LIBRARY_DTYPES = frozenset({"float32", "float64"})
LIBRARY_OPCODES = frozenset(
    "abs add ceil cosine divide erf exponential exponential-minus-one floor log log-plus-one maximum minimum multiply "
    "negate power round rsqrt sign sine sqrt square subtract tan tanh".split()
)
LIBRARY_SHAPES = frozenset({"bitcast", "broadcast", "transpose", "iota"})
WINDOW = 32
"""Elements along a dimension beyond which XLA's CPU compiler reduces in windows first, as of jaxlib 0.10."""

SEARCHED = 256
"""Operations between a producer and its reader that are looked at before they count as in the way, which bounds the
time of a deep program: `benchmarks.settings` halves and doubles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The operations that run at once and write one array, that of `operation`.

    `reads` are the operations that it reads from memory, `over` those of them that it may write its result over.
    `readers` are the kernels that read what it writes, in the order in which they are told that it is there. One that
    `is_fused` has more than one operation.
    """

    operation: int
    reads: tuple[int, ...]
    over: tuple[int, ...]
    readers: tuple[int, ...] = ()
    is_fused: bool = False


def fuse(operations: Sequence[Operation], outputs: Iterable[int]) -> tuple[Kernel, ...]:
    """The kernels of a program, in the order of its operations, without those that no output needs."""
    graph = _Graph(operations, tuple(dict.fromkeys(outputs)))
    _Library(graph).run()
    _cut_in_windows(graph)
    _Loops(graph).run()
    return graph.kernels()


class _Graph:
    """The operands and readers of every operation while kernels grow.

    An operation is `alive` if it has a kernel of its own, and `flexible` if that kernel may still take others in.
    `n_reads` are the operations of a kernel that read each operand. Readers of one array are at first in the order of
    the program before collectives were combined, -1 is the end of it.
    """

    def __init__(self, operations: Sequence[Operation], outputs: Sequence[int]) -> None:
        self.operations = operations
        self.outputs = outputs
        self.kinds = [operation.kind for operation in operations]
        shapes = {operation.shape: math.prod(operation.shape) for operation in operations}
        self.sizes = [shapes[operation.shape] for operation in operations]
        self.alive = _needed(operations, outputs)
        self.reads: list[dict[int, bool]] = []
        self.readers: list[list[int]] = [[] for _ in operations]
        literals = {index for index, kind in enumerate(self.kinds) if kind == "literal"}
        for index, (operation, alive) in enumerate(zip(operations, self.alive, strict=True)):
            pure = operation.kind in ELEMENTWISE
            self.reads.append({o: pure for o in operation.operands if o not in literals})
            if alive:
                for o in self.reads[index]:
                    self.readers[o].append(index)
        listed_at = post_order(_as_listed(operations), outputs)
        for readers in self.readers:
            readers.sort(key=listed_at.__getitem__)
        for index in outputs:
            self.readers[index].append(-1)
        self.flexible = [kind in PRODUCERS for kind in self.kinds]
        self.n_reads = [dict.fromkeys(reads, 1) for reads in self.reads]
        self.fused: set[int] = set()

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that are left, each with what it reads."""
        kernels: list[Kernel] = []
        for index, reads in enumerate(self.reads):
            if self.alive[index] and self.kinds[index] != "literal":
                ordered = tuple(sorted(reads))
                over = tuple([o for o in ordered if reads[o]])
                readers = tuple(reader for reader in self.readers[index] if reader >= 0)
                fused = index in self.fused
                kernels.append(Kernel(operation=index, reads=ordered, over=over, readers=readers, is_fused=fused))
        return tuple(kernels)


def _cut_in_windows(graph: _Graph) -> None:
    """Leaves every long reduction that the library does not have alone, as it is cut into windows, which are not fused.

    Reference: XLA's TreeReductionRewriter, as of jaxlib 0.10.
    """
    for index, operation in enumerate(graph.operations):
        if graph.kinds[index] == "reduce" and graph.flexible[index] and graph.alive[index]:
            _, axes = cast("tuple[str, tuple[int, ...]]", operation.tag)
            shape = graph.operations[operation.operands[0]].shape
            graph.flexible[index] = all(shape[axis] <= WINDOW for axis in axes)


class _Library:
    """The kernels of XLA's library: sums and maxima with what they alone read, and what alone reads them."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph

    def run(self) -> None:
        """Fuses sums and maxima with the operations around them."""
        for index in reversed(range(len(self.graph.operations))):
            may_grow = self.graph.alive[index] and self.graph.flexible[index]
            if self.graph.kinds[index] == "reduce" and may_grow and self._large(index):
                self._grow(index)

    def _grow(self, index: int) -> None:
        members, root, changed = {index}, index, True
        outside = dict[int, None](dict.fromkeys(self.graph.reads[index]))
        while changed:
            changed = False
            for member in sorted(members, reverse=True):
                for o in self.graph.reads[member]:
                    is_inside = members.issuperset(self.graph.readers[o])
                    if o not in members and is_inside and (self._supported(o) or self._is_product(o)):
                        members.add(o)
                        del outside[o]
                        outside |= dict.fromkeys(below for below in self.graph.reads[o] if below not in members)
                        changed = True
            if (
                len(self.graph.readers[root]) == 1
                and (reader := min(self.graph.readers[root])) >= 0
                and self._supported(reader)
            ):
                members.add(reader)
                outside |= dict.fromkeys(o for o in self.graph.reads[reader] if o not in members)
                root, changed = reader, True
        n_reads = {o: sum(o in self.graph.reads[m] for m in members) for o in outside}
        over = self._over(members, root, outside)
        for o in outside:
            _add(self.graph.readers[o], root)
        for member in sorted(members - {root}, reverse=True):
            for o in self.graph.reads[member]:
                _remove(self.graph.readers[o], member)
            self.graph.alive[member] = False
        self.graph.reads[root], self.graph.n_reads[root] = over, n_reads
        self.graph.flexible[root] = False

    def _over(self, members: set[int], root: int, outside: Iterable[int]) -> dict[int, bool]:
        """Whether a kernel computes each element of its root from those at the same place, for each operand `outside`."""
        pure = set[int]()
        for member in sorted(members, reverse=True):
            readers = [] if member == root else self.graph.readers[member]
            if self.graph.kinds[member] in ELEMENTWISE and pure.issuperset(readers):
                pure.add(member)
        return {o: all(member in pure for member in members if o in self.graph.reads[member]) for o in outside}

    def _supported(self, index: int) -> bool:
        operation = self.graph.operations[index]
        if not self.graph.flexible[index] or not self.graph.alive[index]:
            return False
        if operation.kind in LIBRARY_SHAPES:
            return operation.dtype in LIBRARY_DTYPES or operation.dtype == "int32"
        if operation.kind == "rearrange":
            return operation.name == "pad"
        if operation.kind == "reduce":
            return self._large(index)
        is_supported_name = operation.name in LIBRARY_OPCODES or operation.name.startswith(("power", "convert"))
        return operation.kind in ELEMENTWISE and is_supported_name and self._large(index)

    def _is_product(self, index: int) -> bool:
        """Whether an operation is a matrix product that the library computes where it is reduced."""
        operation = self.graph.operations[index]
        return self.graph.alive[index] and operation.kind == "dot" and self._large(index)

    def _large(self, index: int) -> bool:
        """Whether the library has the types and is worth its overhead."""
        around = (index, *self.graph.operations[index].operands)
        large = max(self.graph.sizes[o] for o in around) >= LIBRARY_ELEMENTS
        return large and all(self.graph.operations[o].dtype in LIBRARY_DTYPES for o in around)


class _Loops:
    """The kernels of everything else: each operation with the producers that may be computed again where they are read.

    `place` is the position of each operation in the order in which they are looked at, the last first.
    """

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.place = _visited(graph.reads, graph.outputs)

    def run(self) -> None:
        """Fuses every operation with the producers that it computes itself."""
        single = self._single()
        for index in sorted(range(len(self.graph.operations)), key=self.place.__getitem__, reverse=True):
            if self.graph.alive[index] and self.graph.flexible[index] and self.graph.reads[index]:
                self._take_in(index, single)

    def _take_in(self, index: int, single: set[int]) -> None:
        reads, reused, readers, n_reads = (
            self.graph.reads[index],
            self._reused(index),
            self.graph.readers,
            self.graph.n_reads[index],
        )
        copies = Copies(self.graph.operations, index, reads)
        queue = [(-self.place[o], o) for o in reads if self.graph.flexible[o]]
        heapq.heapify(queue)
        while queue:
            producer = heapq.heappop(queue)[1]
            if not self._fusible(producer, index, reused) or producer in single:
                continue
            if self.graph.kinds[index] == "bitcast" and index not in self.graph.fused and len(readers[producer]) > 1:
                continue  # it names what is written for others; XLA moves it behind what is computed element by element
            if index in self.graph.fused and copies.is_too_much(producer, self._n_readers(producer)):
                continue
            pure = reads.pop(producer) and self.graph.kinds[producer] in ELEMENTWISE
            self.graph.fused.add(index)
            _remove(readers[producer], index)
            below = self.graph.reads[producer]
            copies.add(producer, below)
            del n_reads[producer]
            if producer in reused:
                reused.update(below)
            elif self.graph.kinds[producer] in REPEATING:
                reused |= self._reused(producer)
            for o in below:
                if o not in reads:
                    _add(readers[o], index)
                    if self.graph.flexible[o]:
                        heapq.heappush(queue, (-self.place[o], o))
                reads[o] = reads.get(o, True) and pure
                n_reads[o] = n_reads.get(o, 0) + 1
            if not readers[producer]:
                self.graph.alive[producer] = False
                for o in below:
                    _remove(readers[o], producer)

    def _n_readers(self, index: int) -> int:
        """The operations that read an array, in all kernels; the end of the program is one."""
        return sum(1 if reader < 0 else self.graph.n_reads[reader][index] for reader in self.graph.readers[index])

    def _fusible(self, producer: int, consumer: int, reused: set[int]) -> bool:
        if not self.graph.flexible[producer]:
            return False
        if self.graph.kinds[producer] in ONCE:
            return self.graph.readers[producer] == [consumer] and producer not in reused
        return True

    def _reused(self, index: int) -> set[int]:
        """The operands whose elements an operation reads more than once; what is joined is read once."""
        kind, reads = self.graph.kinds[index], self.graph.reads[index]
        if self.graph.operations[index].name == "concatenate":
            return set()
        if (
            kind == "broadcast" or self.graph.operations[index].name == "dynamic-slice"
        ):  # XLA does not look at what it takes
            return set(reads)
        return set(list(reads)[1:]) if kind in REPEATING else set()

    def _single(self) -> set[int]:
        """The producers of several large operands that are written to memory, as not all readers can take them in."""
        single: set[int] = set()
        for index in reversed(range(len(self.graph.operations))):
            if len(self.graph.readers[index]) < 2 or len(self.graph.reads[index]) < 2:
                continue
            if not self.graph.alive[index] or not self.graph.flexible[index]:
                continue
            rank = _rank(self.graph.operations[index])
            large = [
                o
                for o in self.graph.reads[index]
                if self.graph.kinds[o] not in ("broadcast", "iota") and _rank(self.graph.operations[o]) >= rank
            ]
            read = sum(self.graph.sizes[o] for o in self.graph.reads[index])
            if len(large) <= 1 or read <= self.graph.sizes[index]:
                continue
            if not all(self._on_all_paths(index, reader, single) for reader in self.graph.readers[index]):
                single.add(index)
        return single

    def _on_all_paths(self, producer: int, reader: int, fused: set[int]) -> bool:
        """Whether a reader can take in the producer and everything between them."""
        steps_left, pending, seen = SEARCHED, [reader], {reader}
        while pending:
            current = pending.pop()
            if current < 0 or not self.graph.flexible[current]:
                return False
            for o in self.graph.reads[current]:
                if o < producer or o in seen or not self._reaches(producer, o):
                    continue
                if o in fused or not self._fusible(o, current, self._reused(current)):
                    return False
                steps_left -= 1
                if steps_left == 0:
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
            for o in self.graph.reads[current]:
                if o >= producer and o not in seen:
                    seen.add(o)
                    pending.append(o)
        return False


def _add(readers: list[int], reader: int) -> None:
    """Lists a reader last, unless it is there."""
    if reader not in readers:
        readers.append(reader)


def _remove(readers: list[int], reader: int) -> None:
    """Takes a reader off its list, where the last one takes its place."""
    readers[readers.index(reader)] = readers[-1]
    readers.pop()


def _as_listed(operations: Sequence[Operation]) -> list[Operation]:
    """The operations as they were when readers were listed: collectives that were combined each on its own, and what
    finds the choices of windows where the scatter was that it is a part of, behind what is scattered.

    Not so where it reads what was widened for it: for every reader that is done anew, and joined as it is come to.
    """
    listed, results = list(operations), dict[int, int]()
    for index, operation in enumerate(operations):
        joint = operation.operands[0] if operation.kind == "result" else -1
        if joint >= 0 and operations[joint].name == "combined":
            results[joint] = (member := results.get(joint, -1) + 1)
            listed[index] = operation._replace(operands=(operations[joint].operands[member],))
    for choice, source in windows.sources(operations).items():
        read = operations[choice].operands
        if not operations[read[0]].name.startswith("convert "):
            listed[choice] = listed[choice]._replace(operands=(*read, source))
    return listed


def post_order(operations: Sequence[Operation], outputs: Iterable[int]) -> list[int]:
    """The position of each operation in a post-order visit, the first operand and output first."""
    return _visited([operation.operands for operation in operations], outputs)


def _visited(operands: Sequence[Collection[int]], outputs: Iterable[int]) -> list[int]:
    place, count, pending = [-1] * len(operands), 0, list(outputs)[::-1]
    opened = bytearray(len(operands))
    while pending:
        index = pending[-1]
        if not opened[index]:
            opened[index] = True
            pending.extend([o for o in reversed(list(operands[index])) if not opened[o]])
            continue
        pending.pop()
        if place[index] < 0:
            place[index], count = count, count + 1
    return place


def _rank(operation: Operation) -> int:
    return sum(size > 1 for size in operation.shape)


def _needed(operations: Sequence[Operation], outputs: Iterable[int]) -> list[bool]:
    """Flags of the operations that are inputs or that outputs depend on, [operations]; a kernel writes all results."""
    needed = [operation.kind == "input" for operation in operations]
    for index in outputs:
        needed[index] = True
    for index in reversed(range(len(operations))):
        if needed[index]:
            for o in operations[index].operands:
                needed[o] = True
    for index, operation in enumerate(operations):
        if windows.is_choice(operations, index):
            needed[index] = needed[operation.operands[0]]
    return needed
