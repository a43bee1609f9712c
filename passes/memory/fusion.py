"""The kernels that XLA's CPU compiler fuses operations into, and hence the arrays that are written to memory.

Two passes, as XLA has them. First the kernels of its library (passes/memory/library_kernels.py). Then, from the last
operation to the first, every operation takes in the producers that may be computed again where they are read: any cheap
one, an expensive one only if nobody else reads it and no element is needed twice, and none that a kernel would repeat
too often in its code. A producer of several large operands whose readers cannot all take it in is written to memory for
all.

Reference: xla/service/instruction_fusion.cc and xla/service/cpu/cpu_instruction_fusion.cc, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from passes.memory.code_duplication import Copies
from passes.memory.kernel_graph import Graph, list_reader, unlist_reader, visited
from passes.memory.library_kernels import Library, cut_in_windows
from passes.memory.operations import ELEMENTWISE, Operation

ONCE = frozenset({"expensive", "gather", "reduce"})
REPEATING = frozenset({"broadcast", "gather", "rearrange"})
SEARCHED = 256
"""Operations between a producer and its reader that are looked at before they count as in the way, which bounds the
time of a deep program: `benchmarks.settings` halves and doubles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The operations that run at once and write one array, that of `operation`.

    `reads` are the operations that it reads from memory, `over` those of them that it may write its result over.
    `readers` are the kernels that read what it writes, in the order in which they are told that it is there. One that
    `is_fused` has more than one operation. Kernels of the same operations `joint` are one, which writes all of those.
    One `by_rows` is a kernel of Triton's (passes/memory/gpu_softmax.py).
    """

    operation: int
    reads: tuple[int, ...]
    over: tuple[int, ...]
    readers: tuple[int, ...] = ()
    is_fused: bool = False
    joint: tuple[int, ...] = ()
    by_rows: bool = False


def fuse(operations: Sequence[Operation], outputs: Iterable[int]) -> tuple[Kernel, ...]:
    """The kernels of a program, in the order of its operations, without those that no output needs."""
    graph = Graph(operations, tuple(dict.fromkeys(outputs)))
    Library(graph).run()
    cut_in_windows(graph)
    _Loops(graph).run()
    return _kernels(graph)


def _kernels(graph: Graph) -> tuple[Kernel, ...]:
    """The kernels that are left, each with what it reads."""
    kernels: list[Kernel] = []
    for index, reads in enumerate(graph.reads):
        if graph.alive[index] and graph.kinds[index] != "literal":
            ordered = tuple(sorted(reads))
            over = tuple([o for o in ordered if reads[o]])
            readers = tuple(reader for reader in graph.readers[index] if reader >= 0)
            fused = index in graph.fused
            kernels.append(Kernel(operation=index, reads=ordered, over=over, readers=readers, is_fused=fused))
    return tuple(kernels)


class _Loops:
    """The kernels of everything else: each operation with the producers that may be computed again where they are read.

    `place` is the position of each operation in the order in which they are looked at, the last first.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.place = visited(graph.reads, graph.outputs)

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
            if index in self.graph.fused and copies.is_too_much(producer, self._n_readers(producer)):
                continue
            pure = reads.pop(producer) and self.graph.kinds[producer] in ELEMENTWISE
            self.graph.fused.add(index)
            unlist_reader(readers[producer], index)
            below = self.graph.reads[producer]
            copies.add(producer, below)
            del n_reads[producer]
            if producer in reused:
                reused.update(below)
            elif self.graph.kinds[producer] in REPEATING:
                reused |= self._reused(producer)
            for o in below:
                if o not in reads:
                    list_reader(readers[o], index)
                    if self.graph.flexible[o]:
                        heapq.heappush(queue, (-self.place[o], o))
                reads[o] = reads.get(o, True) and pure
                n_reads[o] = n_reads.get(o, 0) + 1
            if not readers[producer]:
                self.graph.alive[producer] = False
                for o in below:
                    unlist_reader(readers[o], producer)

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


def _rank(operation: Operation) -> int:
    return sum(size > 1 for size in operation.shape)
