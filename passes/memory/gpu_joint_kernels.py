"""The kernels of XLA's GPU compiler that write several arrays.

From the last array to the first, kernels that read it and have its number of elements in common are made one, unless
one waits for another; then the kernel that makes the array is made one with one of those, where something else reads it
too. So the moments and the weights of an update are written by one kernel, and so are all sums of columns of a gradient
and of its products. All of a joint kernel's reads are there when it begins, and all that it writes.

Products and softmax's rows, which kernels of Triton compute, are left alone, and so are scatters and updates. Kernels
that bring dimensions into another order tile by tile are one with those that do it alike: weights that are rounded and
transposed for a convolution do not wait for their own gradient.

Reference: MultiOutputFusion (xla/backends/gpu/transforms/multi_output_fusion.cc) and
ShapesCompatibleForMultiOutputFusion (gpu_fusible.cc), as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from passes.memory.fusion import Kernel
from passes.memory.gpu_blocks import ADDED, by_threads, grouped
from passes.memory.gpu_priorities import Contents
from passes.memory.gpu_times import COPY, SUM, Times, Turn
from passes.memory.gpu_weights import AGAIN
from passes.memory.kernel_graph import visited
from passes.memory.operations import ELEMENTWISE, Operation, Shape

LOOPS = frozenset({*ELEMENTWISE, "rearrange", "broadcast", "gather", "iota", "transpose"})
"""Kinds whose kernels compute element after element."""

OPERANDS = 96
"""Arrays that XLA lets a kernel read and write at most (MaxOperandsAndOutputsPerFusion in gpu_fusible.h, as of jaxlib
0.10)."""

SLICED_NBYTES = 1024
"""Bytes of an array from which kernels that read parts of it which do not overlap stay apart: XLA's, "arbitrarily
chosen"."""

Hero = tuple[object, int]
"""The sum or the transpose that a kernel is, None for a loop, and the elements that it goes over."""


def joined(
    operations: Sequence[Operation],
    kernels: Sequence[Kernel],
    outputs: Iterable[int],
    alone: Iterable[int],
    times: Times,
    contents: Mapping[int, Contents],
) -> tuple[Kernel, ...]:
    """The kernels, with those that are one, by what they write; those `alone` are kernels of Triton. What each computes
    and reads is in `contents`. What only kernels read that are one with the one that makes it is not written.
    """
    outputs = frozenset(outputs)
    groups = _Groups(operations, kernels, outputs, frozenset(alone), times, contents).run()
    group_of = {made: group for group in groups for made in group}
    inside = _inside(kernels, group_of, outputs)
    joint: list[Kernel] = []
    for kernel in kernels:
        if kernel.operation in inside:
            continue
        if (group := group_of.get(kernel.operation)) is not None:
            written = tuple(sorted(made for made in group if made not in inside))
            kernel = _without(replace(kernel, joint=written if len(written) > 1 else ()), inside)
        joint.append(kernel)
    return tuple(joint)


def _inside(
    kernels: Sequence[Kernel], group_of: Mapping[int, Sequence[int]], outputs: frozenset[int]
) -> dict[int, Kernel]:
    """The kernels, by what they make, whose arrays others of the same group alone read: those are not written."""
    readers: dict[int, list[int]] = {}
    for kernel in kernels:
        for read in kernel.reads:
            readers.setdefault(read, []).append(kernel.operation)
    return {
        kernel.operation: kernel
        for kernel in kernels
        if (group := group_of.get(kernel.operation)) is not None
        and kernel.operation not in outputs
        and kernel.operation in readers
        and all(group_of.get(reader) is group for reader in readers[kernel.operation])
    }


def _without(kernel: Kernel, inside: Mapping[int, Kernel]) -> Kernel:
    """A kernel that computes what is inside: it reads what is read for that, and may write over it as that might."""
    reads, over = list(kernel.reads), set(kernel.over)
    while made := [read for read in reads if read in inside]:
        over = {o for o in over if o not in made} | {o for m in made if m in over for o in inside[m].over}
        reads = list(dict.fromkeys(o for read in reads for o in (inside[read].reads if read in inside else (read,))))
    return replace(kernel, reads=tuple(reads), over=tuple([read for read in reads if read in over]))


class _Groups:
    """The kernels by number, each of a group that it names, of all that are `behind` and `before` it as bits."""

    def __init__(
        self,
        operations: Sequence[Operation],
        kernels: Sequence[Kernel],
        outputs: Iterable[int],
        alone: frozenset[int],
        times: Times,
        contents: Mapping[int, Contents],
    ) -> None:
        self.operations, self.kernels = operations, kernels
        self.number = {kernel.operation: n for n, kernel in enumerate(kernels)}
        self.outputs = frozenset(outputs)
        self.readers: list[list[int]] = [[] for _ in kernels]
        self.before, self.behind = [0] * len(kernels), [0] * len(kernels)
        for n, kernel in enumerate(kernels):
            for read in kernel.reads:
                self.readers[self.number[read]].append(n)
                self.before[n] |= self.before[self.number[read]] | 1 << self.number[read]
        for n in reversed(range(len(kernels))):
            for reader in self.readers[n]:
                self.behind[n] |= self.behind[reader] | 1 << reader
        self.groups: dict[int, list[int]] = {}
        self.of = list(range(len(kernels)))
        self.alone, self.times, self.contents = alone, times, contents
        self.heroes = [self._hero(kernel) for kernel in kernels]

    def run(self) -> list[list[int]]:
        """The groups of two or more, as what they write."""
        operands = [[self.number[read] for read in kernel.reads] for kernel in self.kernels]
        place = visited(operands, [self.number[o] for o in self.outputs if o in self.number])
        for n in sorted((n for n, at in enumerate(place) if at >= 0), key=lambda n: -place[n]):
            made = self.kernels[n].operation
            kind = self.operations[made].kind
            if kind in ("literal", "dot") or made in self.alone:
                continue
            if self.operations[made].size > 1:
                self._join_readers(n)
            self._join_maker(n)
        return [[self.kernels[n].operation for n in group] for group in self.groups.values()]

    def _join_readers(self, n: int) -> None:
        """Makes the kernels that read an array one, as far as they may be."""
        readers = [r for r in dict.fromkeys(self.of[r] for r in self.readers[n]) if self.heroes[r]]
        readers.sort(key=lambda r: (-(r in self.groups), -self._is_fused(r)))
        while readers:
            first, *others = readers
            readers = list[int]()
            if first not in self.groups and not self._is_fused(first):
                readers = others
                continue
            for other in others:
                if self._may_be_one(first, other, n):
                    self._join(first, other)
                else:
                    readers.append(other)

    def _may_be_one(self, kept: int, other: int, read: int) -> bool:
        """Whether two kernels that read the same may be one."""
        if self.before[kept] >> other & 1 or self.before[other] >> kept & 1 or not self._is_alike(kept, other):
            return False
        return self.operations[self.kernels[read].operation].nbytes < SLICED_NBYTES or not (
            self._cuts(kept, read) and self._cuts(other, read)
        )

    def _cuts(self, n: int, read: int) -> bool:
        """Whether a kernel reads a part of an array alone."""
        if n in self.groups:
            return False
        index, array = self.kernels[n].operation, self.kernels[read].operation
        operation = self.operations[index]
        while operation.name != "slice":
            inside = [o for o in operation.operands if o not in self.number]
            if len(inside) != 1 or array in operation.operands:
                return False
            operation = self.operations[inside[0]]
        return array in operation.operands

    def _join_maker(self, n: int) -> None:
        """Makes the kernel that makes an array one with one that reads it, where it may be."""
        if n in self.groups or self.of[n] != n or not self.heroes[n] or not self._is_loop(n):
            return
        readers = list(dict.fromkeys(self.of[r] for r in self.readers[n]))
        made = self.kernels[n].operation
        is_output = made in self.outputs
        if len(readers) + is_output == 1 and not any(r in self.groups for r in readers):
            return
        chosen = [r for r in readers if self.heroes[r] and self._is_alike(r, n) and not self._is_behind(r, n)]
        summing = [r for r in chosen if (hero := self.heroes[r]) and hero[0] is not None]
        if summing and _transposes(made, self.operations, self.number):
            chosen = [r for r in chosen if r not in summing]
        chosen = [r for r in chosen if self._is_faster(r, n)]
        if chosen:
            self._join(max(chosen, key=lambda r: (r in self.groups) + self._is_fused(r)), n)

    def _is_faster(self, reader: int, n: int) -> bool:
        """Whether a kernel that reads an array takes no longer where it makes it as well."""
        made, times = self.kernels[n].operation, self.times
        roots = [self.kernels[m].operation for m in self.groups.get(reader, [reader])]
        summed = [root for root in roots if self.operations[root].kind == "reduce"]
        root, nbytes = (summed or roots)[0], sum(self.operations[r].nbytes for r in roots)
        work, reads = 0.0, dict[int, float]()
        for kept in roots:
            work += self.contents[kept].work
            for o, often in self.contents[kept].reads.items():
                reads[o] = max(reads.get(o, 0.0), often)
        inside, sources = self.contents[made].work, self.contents[made].reads
        apart = times.nbytes(root, work, reads, nbytes)
        apart += times.nbytes(made, inside, sources, self.operations[made].nbytes) + times.arithmetic.launch_nbytes
        again = reads.pop(made, 0.0)
        for o, often in sources.items():
            reads[o] = max(reads.get(o, 0.0), often * again)
        return times.nbytes(root, work + inside * again, reads, nbytes + self.operations[made].nbytes) <= apart

    def _is_loop(self, n: int) -> bool:
        operation = self.operations[self.kernels[n].operation]
        return operation.kind in LOOPS and operation.kind != "transpose" and operation.name != COPY

    def _is_behind(self, reader: int, n: int) -> bool:
        """Whether a kernel reads what follows from an array, beside the array."""
        reads = (self.number[read] for m in self.groups.get(reader, [reader]) for read in self.kernels[m].reads)
        return any(self.behind[n] >> read & 1 for read in reads if self.of[read] != reader)

    def _is_alike(self, kept: int, other: int) -> bool:
        """Whether two kernels go over as many elements, and sum them in the same way where both do, in all not over
        more arrays than a kernel may read and write.
        """
        first, second = self.heroes[kept], self.heroes[other]
        if not first or not second or first[1] != second[1]:
            return False
        if first[0] is not None and second[0] is not None and first[0] != second[0]:
            return False
        members = [*self.groups.get(kept, [kept]), *self.groups.get(other, [other])]
        return len({read for m in members for read in self.kernels[m].reads}) + len(members) <= OPERANDS

    def _hero(self, kernel: Kernel) -> Hero | None:
        """The sum and the elements that a kernel goes over, None for one that is no part of a joint kernel."""
        operation = self.operations[kernel.operation]
        if kernel.operation in self.alone:
            return None
        if operation.kind == "reduce" and operation.name in ADDED:
            (read,) = operation.operands
            source = self.operations[read]
            if by_threads(operation, source):
                return (None, operation.size) if read not in self.number else None
            return grouped(operation, source), source.size
        if (turned := self._turned(kernel.operation)) >= 0:
            return (self.operations[turned].tag, self.operations[turned].shape), operation.size
        if operation.kind == "rearrange" and operation.name == COPY:
            return (operation.tag, operation.shape), operation.size
        if operation.kind in ELEMENTWISE:
            return None, operation.size
        if operation.kind in LOOPS and self._is_fused(self.number[kernel.operation]):
            return None, operation.size
        return None

    def _turned(self, made: int) -> int:
        """The transpose that a kernel makes tile by tile, -1 if it makes none."""
        operations, turns = self.operations, self.times.turns
        inside = self.contents[made].inside if self.contents[made].turn else ()
        return next((o for o in inside if turns[o] == Turn.TILED and operations[o].size == operations[made].size), -1)

    def _is_fused(self, n: int) -> bool:
        """Whether a kernel has more than one operation: that adds parts of a product rounds their sum."""
        operation = self.operations[self.kernels[n].operation]
        if operation.name == SUM:
            return operation.dtype != self.operations[operation.operands[0]].dtype
        return operation.name == AGAIN or any(o not in self.number for o in operation.operands)

    def _join(self, kept: int, other: int) -> None:
        """Makes the kernels of one group and of another one."""
        members = [*self.groups.pop(kept, [kept]), *self.groups.pop(other, [other])]
        mask = sum(1 << m for m in members)
        before = (self.before[kept] | self.before[other]) & ~mask
        behind = (self.behind[kept] | self.behind[other]) & ~mask
        for n in _bits((self.behind[kept] ^ self.behind[other]) & ~mask):
            self.before[n] |= before | mask
        for n in _bits((self.before[kept] ^ self.before[other]) & ~mask):
            self.behind[n] |= behind | mask
        hero = next((h for h in (self.heroes[kept], self.heroes[other]) if h and h[0] is not None), self.heroes[kept])
        self.groups[kept] = members
        for m in members:
            self.of[m], self.before[m], self.behind[m] = kept, before, behind
        self.heroes[kept] = hero


def _transposes(made: int, operations: Sequence[Operation], written: Container[int]) -> bool:
    """Whether the kernel that makes an array brings another dimension to where elements lie beside each other: XLA
    makes no transpose one with a reduction (FusionHeroesAreCompatible in gpu_fusible.cc).
    """
    pending, seen = [made], {made}
    while pending:
        operation = operations[pending.pop()]
        if operation.name == COPY:
            return True
        if operation.kind == "transpose":
            order = [d for d, size in zip(cast("Shape", operation.tag), operation.shape, strict=True) if size > 1]
            if order and order[-1] != max(order):
                return True
        inside = [o for o in operation.operands if o not in written and o not in seen]
        seen.update(inside)
        pending.extend(inside)
    return False


def _bits(mask: int) -> Iterator[int]:
    """The positions of the bits of a mask."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
