"""When every array is in memory: kernels in the order in which XLA's CPU compiler runs them, and what is live then.

Kernels run breadth first: each as soon as what it reads is there, in the order in which that happened. A kernel writes
over an operand that nothing reads afterwards if it reads each element where it writes it; updates and the carries of
loops write over theirs. What a program returns is written where it belongs, and so is what that is written over.

Reference: XLA's BFScheduler, HloDataflowAnalysis::CanShareOperandBufferWithUser and copy insertion, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel

ALIGNMENT = 64
"""Bytes of which the size of every buffer is a multiple, in XLA's CPU client."""

NEAR = 4
"""Kernels between two readers of one value within which their order is not relied on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Room for the results of `operations`, each written over the one before, from kernel `first` to kernel `last`."""

    operations: tuple[int, ...]
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The operations in the order in which their kernels run, the buffers between them, and who reads each by name.

    `names` gives the operation in whose buffer a result is, `readers` the operations that read a buffer, by name.
    """

    order: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    readers: Mapping[int, Sequence[int]]

    def nbytes(self, inside: Mapping[int, int]) -> list[int]:
        """Live bytes while each kernel runs, [kernels], with those `inside` loops, by operation."""
        change = [0] * (len(self.order) + 1)
        for buffer in self.buffers:
            change[buffer.first] += buffer.nbytes
            change[buffer.last + 1] -= buffer.nbytes
        totals: list[int] = []
        total = 0
        for position, operation in enumerate(self.order):
            total += change[position]
            totals.append(total + inside.get(operation, 0))
        return totals


def lifetimes(program: DeviceProgram, kernels: Sequence[Kernel], carried: Mapping[int, int]) -> Lifetimes:
    """When what is live; in the body of a loop, output `o` is written over input `carried[o]` (positions of both)."""
    return _Allocation(program, kernels, carried).run()


def schedule(program: DeviceProgram, kernels: Sequence[Kernel]) -> list[int]:
    """The operations that kernels write, in the order in which they run.

    What reads nothing stands behind the constants that it is made of, which come after the inputs.
    """
    readers: dict[int, list[int]] = {kernel.operation: [] for kernel in kernels}
    waiting = {kernel.operation: len(kernel.reads) for kernel in kernels}
    for kernel in sorted(kernels, key=lambda kernel: kernel.turn):
        for read in kernel.reads:
            readers[read].append(kernel.operation)
    unread = [kernel.operation for kernel in kernels if not kernel.reads]
    ready = deque(o for o in unread if program.operations[o].kind == "input")
    constants = [o for o in unread if program.operations[o].kind != "input"]
    inputs, order = len(ready), list[int]()
    while ready or constants:
        if len(order) == inputs:
            ready.extend(constants)
            constants = []
        operation = ready.popleft()
        order.append(operation)
        for reader in readers[operation]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return order


class _Allocation:
    """Buffers as kernels run: `names` sees through what is only another name, `last` is when a buffer is last read."""

    def __init__(self, program: DeviceProgram, kernels: Sequence[Kernel], carried: Mapping[int, int]) -> None:
        self.operations = program.operations
        self.order = schedule(program, kernels)
        self.kernels = {kernel.operation: kernel for kernel in kernels}
        self.at = {operation: position for position, operation in enumerate(self.order)}
        self.names: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for operation in self.order:
            self.names[operation] = self._name(operation)
            for read in self.kernels[operation].reads:
                self.readers.setdefault(self.names[read], []).append(operation)
        self.last = {name: self.at[readers[-1]] for name, readers in self.readers.items()}
        self.placed = self._placed({self.names[output] for output in program.outputs})
        self.copied = self._copied({self.names[program.outputs[o]]: program.inputs[i] for o, i in carried.items()})

    def _name(self, operation: int) -> int:
        held, reads = self.operations[operation], self.kernels[operation].reads
        renamed = held.kind == "part" or (held.kind == "bitcast" and reads == held.operands)
        return self.names[held.operands[0]] if renamed else operation

    def _placed(self, returned: set[int]) -> set[int]:
        """What is written to where outputs belong: those, and what they are written over that nothing else reads."""
        placed = set(returned)
        for operation in reversed(self.order):
            held = self.operations[operation]
            if operation in placed and held.kind in ("update", "carry"):
                target = held.operands[0]
                if self.names.get(target) == target and len(self.readers[target]) == 1:
                    placed.add(target)
        return placed

    def _copied(self, carried: Mapping[int, int]) -> list[int]:
        """The carries that are copied first, for something reads them that their new value does not wait for."""
        readers = {before: self.readers.get(before, ()) for before in carried.values()}
        marked = dict.fromkeys(reader for found in readers.values() for reader in found)
        bits = {reader: 1 << position for position, reader in enumerate(marked)}
        behind: dict[int, int] = {}
        for operation in self.order:
            mask = bits.get(operation, 0)
            for read in self.kernels[operation].reads:
                mask |= behind[read]
            behind[operation] = mask
        copied: list[int] = []
        for after, before in carried.items():
            late = any(not behind[after] & bits[reader] for reader in readers[before] if reader != after)
            held, kernel = self.operations[after], self.kernels[after]
            over = held.operands[:1] if held.kind in ("carry", "update") else kernel.over
            if late or (before in kernel.reads and before not in over):
                copied.append(before)
        return copied

    def run(self) -> Lifetimes:
        """Every buffer, from the first kernel that writes it to the last that reads it."""
        holders: dict[int, int] = {}
        written: dict[int, list[int]] = {}
        for operation in self.order:
            held = self.operations[operation]
            if self.names[operation] != operation or operation in self.placed or held.kind == "input":
                continue
            holder = self._written_over(operation, holders)
            last = self.last.get(operation, self.at[operation])
            holders[operation] = holder
            self.last[holder] = max(self.last.get(holder, last), last)
            written.setdefault(holder, []).append(operation)
        copies = (Buffer(operations=(o,), nbytes=self._nbytes(o), first=0, last=self.last[o]) for o in self.copied)
        buffers = (
            Buffer(operations=tuple(results), nbytes=self._nbytes(o), first=self._first(o), last=self.last[o])
            for o, results in written.items()
        )
        return Lifetimes(order=tuple(self.order), buffers=(*copies, *buffers), readers=self.readers)

    def _first(self, operation: int) -> int:
        held = self.operations[operation]
        return self.at[held.operands[0] if held.kind == "result" else operation]

    def _nbytes(self, operation: int) -> int:
        return -(-self.operations[operation].nbytes // ALIGNMENT) * ALIGNMENT

    def _written_over(self, operation: int, holders: Mapping[int, int]) -> int:
        """The operation in whose buffer a result is written: that of an operand, or its own."""
        held = self.operations[operation]
        over = held.operands[:1] if held.kind in ("carry", "update") else self.kernels[operation].over
        for read in over:
            holder = holders.get(self.names.get(read, -1))
            same = self.operations[read].nbytes == held.nbytes
            if (
                holder is not None
                and same
                and self.last[holder] == self.at[operation]
                and self._is_last(read, operation)
            ):
                return holder
        return operation

    def _is_last(self, read: int, operation: int) -> bool:
        """Whether no other reader runs so shortly before that the compiler may have it run after."""
        others = (self.at[reader] for reader in self.readers[self.names[read]] if reader != operation)
        return max(others, default=-NEAR) + NEAR < self.at[operation]
