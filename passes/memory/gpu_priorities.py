"""The order in which XLA's GPU compiler fuses operations: what gains most goes first.

Every operation begins as a kernel. What it gains to compute one in all kernels that read it, rather than to write it,
is the difference of the times of all of these. The one that gains most is fused with its readers; then what these and
it read gains something else. It ends when nothing gains any more. Names of arrays are fused before all else.

    gain(p) = launch + time(p) + sum over readers c of (time(c) - time(c with p))

How often a kernel computes an operation: once for each element of its own where all that follows up to the root works
on elements, and again for every reader that takes its elements at other places.

Reference: PriorityFusion (xla/backends/gpu/transforms/priority_fusion.cc), and of xla/service/gpu/model
GpuPerformanceModel and GpuHloCostAnalysis::FusionCalculateUtilizations, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from passes.memory.gpu_times import FUSIBLE, SUM, Times
from passes.memory.operations import ELEMENTWISE

TAKES_IN = frozenset({*FUSIBLE, "reduce", "update"})
"""Kinds whose kernels compute what they read."""

PARTS = frozenset({"slice", "dynamic-slice"})
"""The names of what takes a part of an array alone."""

Roots = frozenset[int]
"""The operations of a kernel for whose elements another one is computed."""


@dataclass(slots=True)
class Contents:
    """The operations and arrays of a root's kernel.

    `inside` are its operations from the last to the first, `reads` how many times of each array it reads, and `uses`
    for which of its operations, each of which it computes `times`; it reads what is `turned` in another order of its
    dimensions.
    """

    inside: list[int]
    work: float = 0.0
    nbytes: float = 0.0
    turn: int = 0
    turned: set[int] = field(default_factory=set[int])
    reads: dict[int, float] = field(default_factory=dict[int, float])
    uses: dict[int, Roots] = field(default_factory=dict[int, Roots])
    times: dict[int, float] = field(default_factory=dict[int, float])


class Priorities:
    """The kernels by root, while operations are fused; `readers` are the kernels that read each.

    Some begin with more than their root: `inside` has what. They are Triton's, which keeps a row while it works on it,
    so all of this is as if on elements, and so are `row_sums` and what is spread of these over rows. `may_fuse` says of
    an operation whether it may be computed by the kernels that read it. `terms` are what readers that have not changed
    since then add to the gain of each.
    """

    def __init__(
        self,
        times: Times,
        readers: Sequence[Sequence[int]],
        roots: Iterable[int],
        inside: Mapping[int, Sequence[int]],
        row_sums: Collection[int],
        may_fuse: Callable[[int, Collection[int], Mapping[int, Contents]], bool],
    ) -> None:
        self.times, self.operations, self.may_fuse = times, times.operations, may_fuse
        self.launch_nbytes = times.arithmetic.launch_nbytes
        self.is_on_elements = [o.kind in ELEMENTWISE and o.name != SUM for o in self.operations]
        begun = {o: root for root, made in inside.items() for o in made}
        for o in (*begun, *row_sums, *self._spread(row_sums, readers)):
            self.is_on_elements[o] = True
        self.kernels = {
            root: Contents(sorted((root, *inside.get(root, ())), reverse=True)) for root in roots if root not in begun
        }
        self.readers = {root: dict.fromkeys([begun.get(r, r) for r in readers[root]]) for root in self.kernels}
        self.terms = {root: dict[int, float]() for root in self.kernels}
        self.gains: dict[int, float] = {}
        self.queue: list[tuple[float, int]] = []
        for root in self.kernels:
            if self.operations[root].kind in TAKES_IN:
                self._count_anew(root)

    def _spread(self, sums: Collection[int], readers: Sequence[Sequence[int]]) -> Iterator[int]:
        """The broadcasts of what is made of sums, one number for each."""
        pending, seen = list(sums), set(sums)
        while pending:
            index = pending.pop()
            for reader in readers[index]:
                operation = self.operations[reader]
                if operation.kind == "broadcast":
                    yield reader
                elif operation.kind in (*ELEMENTWISE, "bitcast") and reader not in seen:
                    seen.add(reader)
                    pending.append(reader)

    def run(self) -> dict[int, Contents]:
        """The kernels that are left when nothing gains any more."""
        for root in self.kernels:
            self._push(root)
        while self.queue:
            gain, minus = heapq.heappop(self.queue)
            if self.gains.get(-minus) == -gain:
                self._fuse(-minus)
        return self.kernels

    def _push(self, root: int) -> None:
        gain = self.gains[root] = self._gain(root)
        if gain >= 0:
            heapq.heappush(self.queue, (-gain, -root))

    def _gain(self, root: int) -> float:
        """The bytes that memory moves in the time that is gained where all readers compute an operation."""
        readers = self.readers[root]
        if not readers or not self.may_fuse(root, readers, self.kernels):
            return -math.inf
        if self.operations[root].kind == "bitcast":
            return math.inf
        if all(self.operations[reader].kind == "bitcast" for reader in readers):
            return -math.inf
        gain, terms = self.kernels[root].nbytes + self.launch_nbytes, self.terms[root]
        for reader in readers.keys() - terms.keys() if len(terms) < len(readers) else ():
            terms[reader] = self.kernels[reader].nbytes - self._nbytes_with(root, reader)
        for reader in readers:
            gain += terms[reader]
        return gain

    def _fuse(self, root: int) -> None:
        """Lets all readers of an operation compute it."""
        fused, readers = self.kernels.pop(root), self.readers.pop(root)
        del self.gains[root], self.terms[root]
        changed = dict.fromkeys(readers)
        for reader in readers:
            contents = self.kernels[reader]
            self._take_in(reader, fused.inside)
            self.terms[reader].clear()
            for o in contents.reads:
                if o in self.kernels:
                    self.readers[o][reader] = None
                    self.terms[o].pop(reader, None)
                    changed[o] = None
        for o in fused.reads:
            if o in self.kernels:
                self.readers[o].pop(root, None)
                self.terms[o].pop(root, None)
        for o in changed:
            self._push(o)

    def _take_in(self, root: int, inside: Sequence[int]) -> None:
        """Counts what a kernel computes and reads once it computes these as well."""
        contents = self.kernels[root]
        known = contents.inside
        contents.inside = sorted({*known, *inside}, reverse=True)
        if len(contents.inside) == len(known) + len(inside):
            self._count(root, inside)  # all that it computes of what they are made of
        else:
            self._count_anew(root)

    def _count_anew(self, root: int) -> None:
        """Counts what a kernel computes and reads."""
        contents = self.kernels[root]
        contents.uses, contents.times = {root: frozenset((root,))}, {root: 1.0}
        contents.work, contents.turn, contents.turned = 0.0, 0, set()
        self._count(root, contents.inside)

    def _count(self, root: int, inside: Iterable[int]) -> None:
        """Adds what a kernel computes and reads for these of its operations, from the last to the first, of which it
        has counted none.
        """
        contents, operations, times = self.kernels[root], self.operations, self.times
        works, turns = times.works, times.turns
        uses, often, work, turn, turned = contents.uses, contents.times, contents.work, contents.turn, contents.turned
        for index in inside:
            mine = uses.pop(index)
            total = _total(often, mine)
            work += works[index] * total
            turn = max(turn, turns[index])
            operands = operations[index].operands
            if turns[index] or index in turned:
                turned.update(operands)
            if self.is_on_elements[index]:
                for o in operands:
                    uses[o] = uses[o] | mine if o in uses else mine
                continue
            for o in dict.fromkeys(operands):
                uses[o] = uses.get(o, frozenset[int]()) | {o}
                often[o] = often.get(o, 0.0) + total * self._share(index, o)
        contents.work, contents.turn = work, turn
        contents.reads = {o: _total(often, by) for o, by in uses.items()}
        turned.intersection_update(uses)
        written = times.wholes[root] + self._again_nbytes(contents)
        contents.nbytes = times.nbytes(root, work, contents.reads, written, turn, turned)

    def _share(self, index: int, operand: int) -> float:
        """The times of an operand that an operation reads."""
        operation = self.operations[index]
        if operation.kind in ("broadcast", "gather") or (operation.kind == "rearrange" and operation.name in PARTS):
            return self.times.sizes[index] / max(1, self.times.sizes[operand])
        return 1.0

    def _again_nbytes(self, contents: Contents) -> int:
        """The bytes that an operation reads once more while it is alone, as a square does."""
        if len(contents.inside) > 1 or not self.is_on_elements[contents.inside[0]]:
            return 0
        operation = self.operations[contents.inside[0]]
        if operation.name != "square" and len(set(operation.operands)) == len(operation.operands):
            return 0
        return self.times.wholes[operation.operands[0]]

    def _nbytes_with(self, root: int, reader: int) -> float:
        """The bytes that memory moves in the time of a kernel that computes an operation which it reads."""
        fused, contents = self.kernels[root], self.kernels[reader]
        often = contents.reads[root]
        reads = contents.reads.copy()
        del reads[root]
        for o, total in fused.reads.items():
            if o in reads:
                reads[o] += total * often - self._common(root, reader, o)
            else:
                reads[o] = total * often
        work, turn = contents.work + fused.work * often, max(contents.turn, fused.turn)
        turned = contents.turned | (fused.reads.keys() if root in contents.turned else fused.turned)
        return self.times.nbytes(reader, work, reads, self.times.wholes[reader], turn, turned)

    def _common(self, root: int, reader: int, operand: int) -> float:
        """The times of an operand that a kernel reads already where an operation that it computes takes it."""
        fused, contents = self.kernels[root], self.kernels[reader]
        if root not in fused.uses[operand]:
            return 0.0
        return sum(contents.times[use] for use in contents.uses[operand] & contents.uses[root])


def _total(often: Mapping[int, float], uses: Roots) -> float:
    """The times of all uses; most have one."""
    if len(uses) == 1:
        (use,) = uses
        return often[use]
    return sum(often[use] for use in uses)
