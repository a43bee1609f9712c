"""Reshapes behind the elementwise operations that XLA moves ahead of them.

Reference: XLA's ReshapeMover with the options of its CPU compiler, as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from passes.memory.kernel_graph import needed
from passes.memory.operations import ELEMENTWISE, Operation, Shape


def moved_down(operations: Sequence[Operation], outputs: Sequence[int]) -> tuple[tuple[Operation, ...], list[int]]:
    """The operations with reshapes behind what is computed before them, and the new position of each old one.

    What reduces dimensions that were joined, and no others, then reduces those that they were joined from.
    """
    readers: list[list[int]] = [[] for _ in operations]
    for index, is_needed in enumerate(needed(operations, outputs)):
        for operand in operations[index].operands if is_needed else ():
            readers[operand].append(index)
    for output in outputs:
        readers[output].append(-1)
    moved = computed_before(operations, readers)
    return _Moved(operations, moved).run() if moved else (tuple(operations), list(range(len(operations))))


class _Moved:
    """The operations while those that are `moved` ahead of a reshape are written anew; `place` is the new position of
    each old one, under its own shape, and `before` that of each moved one under the shape before.
    """

    def __init__(self, operations: Sequence[Operation], moved: frozenset[int]) -> None:
        self.operations, self.moved = operations, moved
        self.changed: list[Operation] = []
        self.place: list[int] = []
        self.before: dict[int, int] = {}

    def run(self) -> tuple[tuple[Operation, ...], list[int]]:
        """The operations, and the new position of each old one."""
        for index, operation in enumerate(self.operations):
            if index in self.moved:
                self.place.append(self._moved(index))
            elif operation.kind == "bitcast" and operation.tag is None:
                self.place.append(self._reshaped(operation))
            elif operation.kind == "reduce":
                self.place.append(self._add(self._reduced(operation)))
            else:
                self.place.append(self._add(operation.reading(tuple(self.place[o] for o in operation.operands))))
        return tuple(self.changed), self.place

    def _add(self, operation: Operation) -> int:
        self.changed.append(operation)
        return len(self.changed) - 1

    def _moved(self, index: int) -> int:
        """Adds an operation under the shape of its operands before they were reshaped; the reshape of it."""
        operation = self.operations[index]
        shape = next(self.changed[base].shape for o in operation.operands if (base := self._base(o)) is not None)
        operands = tuple(self._under(o, shape) for o in operation.operands)
        self.before[index] = self._add(operation._replace(operands=operands, shape=shape, is_moved=True))
        return self._add(operation._replace(kind="bitcast", operands=(self.before[index],), tag=None))

    def _base(self, index: int) -> int | None:
        """The new position of what an operation is a reshape of; None where it is none."""
        operation = self.operations[index]
        if index in self.moved:
            return self.before[index]
        if operation.kind != "bitcast" or operation.tag is not None:
            return None
        return self._source(operation.operands[0])

    def _source(self, index: int) -> int:
        return self.before.get(index, self.place[index])

    def _under(self, index: int, shape: Shape) -> int:
        """The new position of an operand under the shape before, which a number takes on."""
        if (base := self._base(index)) is not None:
            return base
        operation = self.operations[index]
        if operation.kind == "literal":
            return self.place[index]
        return self._add(operation._replace(operands=tuple(self.place[o] for o in operation.operands), shape=shape))

    def _reshaped(self, operation: Operation) -> int:
        """The new position of a reshape: that of its operand, if that has the shape."""
        source = self._source(operation.operands[0])
        if self.changed[source].shape == operation.shape:
            return source
        return self._add(operation.reading((source,)))

    def _reduced(self, operation: Operation) -> Operation:
        """A reduction, of what its operand was reshaped from if that may be."""
        read = operation.reading(tuple(self.place[o] for o in operation.operands))
        source = self._base(operation.operands[0])
        if source is None or len(read.operands) > 1 or not isinstance(operation.tag, tuple):
            return read
        name, axes = cast("tuple[str, tuple[int, ...]]", operation.tag)
        shape = self.operations[operation.operands[0]].shape
        if (before := axes_before(self.changed[source].shape, shape, axes)) is None:
            return read
        return operation._replace(operands=(source,), tag=(name, tuple(before)))


def axes_before(before: Shape, after: Shape, axes: Sequence[int]) -> list[int] | None:
    """The dimensions that were joined to `axes`, and only to those; None where a reshape did anything else."""
    if len(axes) == len(after):
        return list(range(len(before)))
    reduced: list[int] = []
    position = 0
    for dimension, size in enumerate(after):
        joined = [position]
        while position < len(before) and math.prod(before[d] for d in joined) < size and joined[-1] + 1 < len(before):
            joined.append(joined[-1] + 1)
        if position >= len(before) or math.prod(before[d] for d in joined) != size:
            return None
        if dimension in axes:
            reduced.extend(joined)
        elif len(joined) > 1:
            return None
        position = joined[-1] + 1
    return reduced if position == len(before) else None


def computed_before(operations: Sequence[Operation], readers: Sequence[Sequence[int]]) -> frozenset[int]:
    """The operations that are computed under the shape that their operands had before they were reshaped.

    All operands of one are reshaped from one shape, or a number in every element. All `readers` of what is reshaped
    must be such operations, or none is; -1 is a reader that is the end of the program.
    """
    before: dict[int, Shape] = {
        index: operations[operation.operands[0]].shape
        for index, operation in enumerate(operations)
        if operation.kind == "bitcast" and operation.tag is None
    }
    moved, new = set[int](), list(before)
    while new:
        reached = {reader for o in new for reader in readers[o] if reader >= 0}
        others = {
            reader for index in reached for o in operations[index].operands for reader in readers[o] if o in before
        }
        candidates = {i for i in reached | others if i not in moved and _may_move(operations, i, before)}
        while stuck := {i for i in candidates if not _alone(operations[i], readers, candidates, before)}:
            candidates -= stuck
        new = sorted(candidates)
        moved |= candidates
        before |= {i: _shape_before(operations[i], before) for i in new}
    return frozenset(moved)


def _may_move(operations: Sequence[Operation], index: int, before: dict[int, Shape]) -> bool:
    """Whether an operation is elementwise, of operands reshaped from one shape or with one number in every element."""
    if index < 0 or operations[index].kind not in ELEMENTWISE:
        return False
    operands = operations[index].operands
    shapes = {before[o] for o in operands if o in before}
    return len(shapes) == 1 and all(o in before or _is_number(operations, o) for o in operands)


def _is_number(operations: Sequence[Operation], index: int) -> bool:
    operation = operations[index]
    return operation.kind == "literal" or (
        operation.kind == "broadcast" and not operations[operation.operands[0]].shape
    )


def _alone(
    operation: Operation, readers: Sequence[Sequence[int]], candidates: set[int], before: dict[int, Shape]
) -> bool:
    """Whether nothing but candidates reads the operands that are reshaped."""
    return all(candidates.issuperset(readers[o]) for o in operation.operands if o in before)


def _shape_before(operation: Operation, before: dict[int, Shape]) -> Shape:
    return next(before[o] for o in operation.operands if o in before)
