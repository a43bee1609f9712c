"""The elementwise operations that XLA moves ahead of a reshape, so that only the reshape has several readers.

Reference: XLA's ReshapeMover with the options of its CPU compiler, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.memory.operations import ELEMENTWISE, Operation, Shape


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
