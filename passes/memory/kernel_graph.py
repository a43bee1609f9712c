"""The operations of a program while they are fused into kernels: what each reads, and what reads it in which order.

Which reader of an array runs first depends on what fusion does to the list of them: what takes an operation in is added
at the end for what that reads, and where an operation goes, the last of the list takes its place.

Reference: HloInstruction::Users of xla/hlo/ir/hlo_instruction.cc, as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from passes.memory import windows
from passes.memory.operations import ELEMENTWISE, Operation

PRODUCERS = frozenset(
    {"elementwise", "expensive", "broadcast", "iota", "bitcast", "transpose", "rearrange", "gather", "reduce"}
)


class Graph:
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
        self.alive = needed(operations, outputs)
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
            _move(operations, readers)
        for index in outputs:
            self.readers[index].append(-1)
        self.flexible = [kind in PRODUCERS for kind in self.kinds]
        self.n_reads = [dict.fromkeys(reads, 1) for reads in self.reads]
        self.fused: set[int] = set()


def _move(operations: Sequence[Operation], readers: list[int]) -> None:
    """Lists the readers that were moved ahead of a reshape as they come after it: it was one itself, and went."""
    moved = [reader for reader in readers if operations[reader].is_moved]
    if moved:
        place = readers.index(moved[0])
        for reader in moved:
            readers.remove(reader)
        readers.insert(place, moved.pop())
        readers += moved


def list_reader(readers: list[int], reader: int) -> None:
    """Lists a reader last, unless it is there."""
    if reader not in readers:
        readers.append(reader)


def unlist_reader(readers: list[int], reader: int) -> None:
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
    return visited([operation.operands for operation in operations], outputs)


def visited(operands: Sequence[Collection[int]], outputs: Iterable[int]) -> list[int]:
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


def needed(operations: Sequence[Operation], outputs: Iterable[int]) -> list[bool]:
    """Flags of the operations that are inputs or that outputs depend on, [operations]; a kernel writes all results."""
    is_needed = [operation.kind == "input" for operation in operations]
    for index in outputs:
        is_needed[index] = True
    for index in reversed(range(len(operations))):
        if is_needed[index]:
            for o in operations[index].operands:
                is_needed[o] = True
    for index, operation in enumerate(operations):
        if windows.is_choice(operations, index):
            is_needed[index] = is_needed[operation.operands[0]]
    return is_needed
