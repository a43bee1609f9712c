"""The results that XLA's TPU compiler writes since their kernels' readers would read more if they computed them again.

A loop over elements is computed in every kernel that reads its result, unless fewer bytes move where it is written: n
kernels that read r bytes each, or r once, w that are written, and w in each of the n. So what follows from one array of
its own size is always computed again, and a sum of two, as of a residual, is written for four readers. Kernels that add
up a result are one. Computing costs nothing. What products round is counted in float32, as it is rounded later.

Of several that may be written the one goes first that saves most, the last of those that save the same.

Reference: the kernels that libtpu 0.0.42 makes for v5e of sums of two to five arrays that one to five products and sums
read, of chains of two to four of them, and of what is narrowed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from passes.memory.operations import ELEMENTWISE, Operation
from passes.memory.tpu_products import ROUNDED


class Rereads:
    """The bytes that each kernel reads, while results are `written`; those of `parts` belong to a product's kernel."""

    def __init__(
        self,
        operations: Sequence[Operation],
        readers: Sequence[Sequence[int]],
        written: bytearray,
        parts: Sequence[int],
    ) -> None:
        self.operations, self.readers, self.written, self.parts = operations, readers, written, parts
        self.reads: dict[int, set[int]] = {}

    def settle(self) -> None:
        """Marks as written what is cheaper to read than to compute again."""
        gains = [(-saved, -index) for index in range(len(self.operations)) if (saved := self._saved(index)) > 0]
        heapq.heapify(gains)
        while gains:
            position = heapq.heappop(gains)[1]
            saved = self._saved(-position)
            if saved <= 0:
                continue
            if gains and (-saved, position) > gains[0]:
                heapq.heappush(gains, (-saved, position))
                continue
            for kernel in self._kernels(-position):
                self.reads.pop(kernel, None)
            self.written[self._narrowed(-position)] = True

    def _narrowed(self, index: int) -> int:
        """The operation that is written in place of one: what products alone read is rounded for them."""
        readers = {r for r in self.readers[index] if self.operations[r].kind != "reduce"}
        first = min(readers)
        return first if len(readers) == 1 and self.operations[first].tag == ROUNDED else index

    def _saved(self, index: int) -> int:
        """The bytes that fewer are read and written where a result is written, 0 where it cannot be."""
        operation = self.operations[index]
        if self.written[index] or operation.kind not in ELEMENTWISE or operation.tag == ROUNDED:
            return 0
        if self.parts[index] >= 0 or operation.size <= 1 or self._goes_on(index):
            return 0
        read = self._nbytes(self._read_by(index))
        if read <= operation.nbytes:
            return 0
        kernels = self._kernels(index)
        cost = read + operation.nbytes
        if len(kernels) * (read - operation.nbytes) <= cost:  # no kernel can read less than this result in place of all
            return 0
        spared = sum(self._spared(joint, index) for joint in self._joint(kernels))
        return spared - cost

    def _goes_on(self, index: int) -> bool:
        """Whether one loop alone reads a result and makes no more bytes of it, so that its own may be written."""
        first, *others = self.readers[index] or (index,)
        reader = self.operations[first]
        if others or self.written[first] or self.parts[first] >= 0 or reader.tag == ROUNDED:
            return False
        return (
            reader.kind in ELEMENTWISE
            and self.operations[index].size > 1
            and (reader.nbytes <= self.operations[index].nbytes)
            and reader.size == self.operations[index].size
        )

    def _joint(self, kernels: Sequence[int]) -> list[list[int]]:
        """The kernels in groups that run as one: sums of the same arrays, none of which waits for another."""
        groups: list[list[int]] = []
        of_arrays: dict[frozenset[int], list[list[int]]] = {}
        for kernel in sorted(kernels):
            if kernel not in self.reads:
                self.reads[kernel] = self._read_by(kernel)
            if self.operations[kernel].kind != "reduce":
                groups.append([kernel])
                continue
            most = max((self.operations[o].size for o in self.reads[kernel]), default=0)
            key = frozenset(o for o in self.reads[kernel] if self.operations[o].size == most)
            alike = of_arrays.setdefault(key, [])
            joint = next((group for group in alike if self.reads[kernel].isdisjoint(group)), None)
            if joint is None:
                alike.append(joint := [])
                groups.append(joint)
            joint.append(kernel)
        return groups

    def _spared(self, joint: Sequence[int], index: int) -> int:
        """The bytes that kernels, which run as one, read less if a result is written, which they then read."""
        before, after = set[int](), set[int]()
        for kernel in joint:
            before |= self.reads[kernel]
            after |= self._read_by(kernel, index)
        return self._nbytes(before) - self._nbytes(after)

    def _nbytes(self, read: Iterable[int]) -> int:
        return sum(self.operations[o].nbytes for o in read)

    def _read_by(self, kernel: int, there: int = -1) -> set[int]:
        """The arrays that a kernel reads from memory, with one more that is `there`."""
        read, seen, pending = set[int](), set[int](), list(self.operations[kernel].operands)
        while pending:
            if (o := pending.pop()) in seen:
                continue
            seen.add(o)
            if self.operations[o].kind == "literal":
                continue
            if self.written[o] or o == there:
                read.add(o)
            else:
                pending.extend(self.operations[o].operands)
        return read

    def _kernels(self, index: int) -> list[int]:
        """The kernels that compute a result, as they read what follows from it."""
        kernels, seen, pending = list[int](), set[int](), list(self.readers[index])
        while pending:
            if (reader := pending.pop()) in seen:
                continue
            seen.add(reader)
            if self.written[reader]:
                kernels.append(reader)
            else:
                pending.extend(self.readers[reader])
        return kernels
