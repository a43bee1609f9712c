"""Liveness: the time that every array is in memory, with kernels in the order in which XLA's CPU compiler runs them.

Kernels run breadth first: each as soon as what it reads is there, in the order in which that happened. A kernel writes
over an operand that nothing reads afterwards if it reads each element where it writes it; updates and the carries of
loops write over theirs. What a program returns is written where it belongs, and so is what that is written over.

Reference: XLA's BFScheduler, HloDataflowAnalysis::CanShareOperandBufferWithUser and copy insertion, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.operations import Operation, elements_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer for the results of `operations`, each written over the one before, from kernel `first` to kernel `last`.

    The kernels `starts` write them, but for those that must be written over the one before: what a kernel of a library
    and a loop change in place. By default, that is the first.
    """

    operations: tuple[int, ...]
    nbytes: int
    first: int
    last: int
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The operations in the order in which their kernels run, the buffers between them, and every name's readers.

    Each input is read last by kernel `read`, each output first written to its place by kernel `written`, -1 for never;
    `over` are the buffers that kernel may write it over, by output and by position. What is copied is read by its copy
    alone, which is made first: not before then is its place free, so the copy is never in it.
    """

    order: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    readers: Mapping[int, Sequence[int]]
    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    over: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])


def lifetimes(
    program: DeviceProgram,
    kernels: Sequence[Kernel],
    carried: Mapping[int, int],
    order: Sequence[int] | None = None,
    stored: Callable[[Operation], int] = elements_nbytes,
    *,
    copies_late: bool = False,
    over_views: bool = False,
    ends_late: bool = False,
) -> Lifetimes:
    """The lifetimes of all buffers; in a loop's body, output `o` is written over input `carried[o]` (positions of
    both).

    What lies where an output is written is copied if some kernel reads it that need not run before; if `copies_late`,
    in the `order` of kernels, only if it does not run before. Kernels that write `over_views` write over what they read
    in another shape, too. If collectives end late (`ends_late`), what they send is there until they do.
    """
    order = schedule(program, kernels) if order is None else order
    how = {"copies_late": copies_late, "over_views": over_views, "ends_late": ends_late}
    return _Allocation(program, kernels, carried, order, stored, **how).run()


def schedule(program: DeviceProgram, kernels: Sequence[Kernel]) -> list[int]:
    """The operations that kernels write, in the order in which they run.

    Arguments come first, then loops over nothing but constants of their own; what reads a constant stands behind what
    they make ready.
    """
    readers = {kernel.operation: kernel.readers for kernel in kernels}
    waiting = {kernel.operation: len(kernel.reads) for kernel in kernels}
    unread = [kernel for kernel in kernels if not kernel.reads]
    inputs = [kernel.operation for kernel in unread if program.operations[kernel.operation].kind == "input"]
    closed = [kernel.operation for kernel in unread if kernel.is_fused]
    first = {*inputs, *closed}
    constants = [kernel.operation for kernel in unread if kernel.operation not in first]
    ready, order = deque([*inputs, *closed]), list[int]()
    while ready or constants:
        if len(order) == len(first):
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
    """The buffers while kernels run: `names` sees through other names, `last` is the last kernel to read each."""

    def __init__(
        self,
        program: DeviceProgram,
        kernels: Sequence[Kernel],
        carried: Mapping[int, int],
        order: Sequence[int],
        stored: Callable[[Operation], int],
        *,
        copies_late: bool,
        over_views: bool,
        ends_late: bool,
    ) -> None:
        self.operations, self.inputs, self.outputs = program.operations, program.inputs, program.outputs
        self.order, self.stored, self.copies_late, self.over_views = order, stored, copies_late, over_views
        self.kernels = {kernel.operation: kernel for kernel in kernels}
        self.at = {operation: position for position, operation in enumerate(self.order)}
        self.names: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for operation in self.order:
            self.names[operation] = self._name(operation)
            for read in self.kernels[operation].reads:
                self.readers.setdefault(self.names[read], []).append(operation)
        self.last = {name: self._end(readers[-1]) for name, readers in self.readers.items()}
        if ends_late:
            self._send_long()
        self.placed = self._placed({self.names[output] for output in program.outputs})
        replaced = {self.names[program.outputs[o]]: program.inputs[i] for o, i in carried.items()}
        self.copied = [*self._copied(replaced), *program.entering]  # what enters has a place until it is sent

    def _name(self, operation: int) -> int:
        described, reads = self.operations[operation], self.kernels[operation].reads
        renamed = described.kind == "part" or (described.kind == "bitcast" and reads == described.operands)
        return self.names[described.operands[0]] if renamed else operation

    def _send_long(self) -> None:
        """Has collectives end when what they make is read first: until then there is what they send."""
        for operation in self.order:
            if self.operations[operation].kind == "collective":
                end = self._first_read(operation) - 1
                for read in self.kernels[operation].reads:
                    self.last[self.names[read]] = max(self.last[self.names[read]], end)

    def _first_read(self, operation: int) -> int:
        """The kernel that first reads an array, or one of its parts."""
        reads = ((r, self.operations[r].kind == "result") for r in self.readers.get(operation, ()))
        return min((self._first_read(r) if part else self.at[r] for r, part in reads), default=len(self.order))

    def _placed(self, returned: set[int]) -> set[int]:
        """The operations written where outputs belong: outputs, and what they overwrite that nothing else reads."""
        placed = set(returned)
        for operation in reversed(self.order):
            described = self.operations[operation]
            if operation in placed and described.kind in ("update", "carry"):
                target = described.operands[0]
                if self.names.get(target) == target and len(self.readers[target]) == 1:
                    placed.add(target)
        return placed

    def _copied(self, carried: Mapping[int, int]) -> list[int]:
        """The carries that are copied first, since some reader does not run before their new value is written."""
        readers = {before: self.readers.get(before, ()) for before in carried.values()}
        runs_before = self._by_order if self.copies_late else _by_need(self.order, self.kernels, readers)
        copied: list[int] = []
        for after, before in carried.items():
            if after == before:  # what does not change stays where it is
                continue
            late = any(not runs_before(reader, after) for reader in readers[before] if reader != after)
            described, kernel = self.operations[after], self.kernels[after]
            over = described.operands[:1] if described.kind in ("carry", "update") else kernel.over
            if late or (before in kernel.reads and before not in over):
                copied.append(before)
        return copied

    def _by_order(self, reader: int, after: int) -> bool:
        """Whether one kernel runs before another, or is one with it."""
        return self.at[reader] < self.at[after] or after in self.kernels[reader].joint

    def run(self) -> Lifetimes:
        """Every buffer, from the first kernel that writes it to the last that reads it."""
        holders: dict[int, int] = {}
        written: dict[int, list[int]] = {}
        for operation in self.order:
            described = self.operations[operation]
            if self.names[operation] != operation or operation in self.placed or described.kind == "input":
                continue
            holder = self._written_over(operation, holders)
            last = self.last.get(operation, self._end(operation))
            if described.kind == "result" and (made_by := self.names[described.operands[0]]) in self.last:
                self.last[made_by] = max(self.last[made_by], last)  # its addresses are kept as long as what is there
            holders[operation] = holder
            self.last[holder] = max(self.last.get(holder, last), last)
            written.setdefault(holder, []).append(operation)
        copies = (
            Buffer(operations=(o,), nbytes=self.stored(self.operations[o]), first=0, last=self.last[o])
            for o in self.copied
        )
        buffers = (
            Buffer(
                operations=tuple(results),
                nbytes=self.stored(self.operations[o]),
                first=self._first(o),
                last=self.last[o],
                starts=tuple([self._first(r) for r in results if r == o or not self._is_tied(r)]),
            )
            for o, results in written.items()
        )
        described = (*copies, *buffers)
        filled = [self._written(self.names[output]) for output in self.outputs]
        return Lifetimes(
            order=tuple(self.order),
            buffers=described,
            readers=self.readers,
            read=tuple(0 if i in self.copied else self.last.get(i, -1) for i in self.inputs),
            written=tuple(filled),
            over=self._overwritten(described, filled),
        )

    def _is_tied(self, operation: int) -> bool:
        """Whether an operation has to be written over its first operand."""
        described = self.operations[operation]
        return described.kind == "carry" or (described.kind == "update" and described.name != "sort")

    def _written(self, output: int) -> int:
        """The kernel that first writes to where an output belongs, -1 where an argument is returned or is elsewhere."""
        first = -1
        while output in self.placed and self.operations[output].kind != "input":
            first, described = self._first(output), self.operations[output]
            output = described.operands[0] if described.kind in ("update", "carry") else -1
        return first

    def _overwritten(self, buffers: Sequence[Buffer], written: Sequence[int]) -> dict[int, list[int]]:
        """The buffers that the kernels which first write outputs may overwrite, by position of both."""
        ends: dict[int, list[int]] = {}
        for index, buffer in enumerate(buffers):
            ends.setdefault(buffer.last, []).append(index)
        overwritten: dict[int, list[int]] = {}
        for position, at in enumerate(written):
            over = self._over_in_place(self.order[at]) if at >= 0 else ()
            names = {self.names.get(read, -1) for read in over}
            overwritten[position] = [index for index in ends.get(at, ()) if buffers[index].operations[-1] in names]
        return overwritten

    def _over_in_place(self, operation: int) -> list[int]:
        """The operands that an output may be written over where it belongs: a scatter over what it adds to, too."""
        described, over = self.operations[operation], self._over(operation)
        scatters = described.kind == "reduce" and described.name.startswith("scatter")
        return [*over, *described.operands[:1]] if scatters else over

    def _first(self, operation: int) -> int:
        """The kernel that writes a result, the first of those that are one."""
        described = self.operations[operation]
        joint = self.kernels[operation].joint
        return min(self.at[o] for o in joint) if joint else self.at[_maker(described, operation)]

    def _end(self, operation: int) -> int:
        """The last of the kernels that are one with that which writes a result."""
        described = self.operations[operation]
        joint = self.kernels[operation].joint
        return max(self.at[o] for o in joint) if joint else self.at[_maker(described, operation)]

    def _written_over(self, operation: int, holders: Mapping[int, int]) -> int:
        """The operation in whose buffer a result is written: that of an operand, or its own.

        Only a kernel that has to be writes over what it reads under another name.
        Reference: XLA's HeapSimulator, which asks whether the operation that wrote is an operand, as of jaxlib 0.10.
        """
        is_tied = self.operations[operation].kind in ("carry", "update")
        for read in self._over(operation):
            name = self.names.get(read, -1)
            holder = holders.get(name)
            if holder is None or name in self.kernels[operation].joint:
                continue
            if self.last[holder] == self._end(operation) and (is_tied or name == read):
                return holder
        return operation

    def _lies(self, operation: int) -> tuple[object, ...]:
        """The dtype and the shape of an array, or its elements alone where kernels write over other views."""
        described = self.operations[operation]
        return described.dtype, described.size if self.over_views else described.shape

    def _is_passed_on(self, operation: int) -> bool:
        """Whether a loop reads an array, and has it under another name after it."""
        return any(self.operations[reader].kind == "loop" for reader in self.readers.get(operation, ()))

    def _over(self, operation: int) -> list[int]:
        """The operands that lie as an operation and that it may be written over: none that another of kernels that are
        one reads elsewhere than where it writes.
        """
        described, kernel = self.operations[operation], self.kernels[operation]
        if described.kind in ("carry", "update"):
            over: Sequence[int] = described.operands[:1]
        else:
            others = [self.kernels[o] for o in kernel.joint]
            read = {o for other in others for o in other.reads if o not in other.over}
            over = [o for o in kernel.over if o not in read and not self._is_passed_on(o)]
        return [o for o in over if self._lies(o) == self._lies(operation)]


def _maker(operation: Operation, index: int) -> int:
    """The operation whose kernel writes a result."""
    return operation.operands[0] if operation.kind == "result" else index


def _by_need(
    order: Sequence[int], kernels: Mapping[int, Kernel], readers: Mapping[int, Sequence[int]]
) -> Callable[[int, int], bool]:
    """The function that says of one of the readers of carries whether another kernel needs it."""
    marked = dict.fromkeys(reader for readers_of_value in readers.values() for reader in readers_of_value)
    bits = {reader: 1 << position for position, reader in enumerate(marked)}
    behind: dict[int, int] = {}
    for operation in order:
        mask = bits.get(operation, 0)
        for read in kernels[operation].reads:
            mask |= behind[read]
        behind[operation] = mask
    return lambda reader, after: bool(behind[after] & bits[reader])
