"""The rooms that loops fill, as XLA's GPU compiler makes them: those of one shape all at once, for all loops.

A loop stacks its results over zeros, and begins to sum with zeros. Equal zeros are one operation; every loop needs
copies of its own, and the kernel that makes the zeros makes these, too. So rooms of a loop of the backward pass may be
in memory from another loop of it on, or from the forward pass.

Reference: HloCSE, CopyInsertion and CopyFusion (xla/service/gpu/transforms/copy_fusion.cc), as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from passes.memory.all_reduces import in_order
from passes.memory.operations import Operation, Shape, is_number


def at_once(operations: Sequence[Operation]) -> tuple[list[Operation], list[int]]:
    """The operations with rooms of one shape as results of one, in a valid order, and the new position of each old
    one.
    """
    rooms: dict[tuple[Shape, str], list[int]] = {}
    for index, operation in enumerate(operations):
        if operation.kind == "fresh" or (operation.kind == "carry" and _is_zero(operations, operation.operands[0])):
            rooms.setdefault((operation.shape, operation.dtype), []).append(index)
    changed = list(operations)
    for (shape, dtype), members in rooms.items():
        if len(members) == 1:
            continue
        zeros = len(changed)
        changed.append(Operation("opaque", (), (len(members),), "uint64", -1, tag=("zeros", zeros)))
        for member in members:
            room = operations[member]
            if room.kind == "fresh":
                changed[member] = room._replace(kind="result", operands=(zeros,))
                continue
            _, *others = room.operands
            changed[member] = room._replace(operands=(len(changed), *others))
            changed.append(Operation("result", (zeros,), shape, dtype, room.node, tag=("zeros", member)))
    for index, operation in enumerate(operations):
        if operation.kind == "loop":
            changed[index] = operation.reading(
                tuple(sorted(operation.operands, key=lambda o: not _is_room(operations[o])))
            )
    ordered, place = in_order(operations, changed)
    return list(ordered), list(place)


def _is_room(operation: Operation) -> bool:
    """Whether a loop changes an operand, which it lists first."""
    return operation.kind in ("fresh", "carry")


def _is_zero(operations: Sequence[Operation], index: int) -> bool:
    """Whether an operation is zero everywhere."""
    operation = operations[index]
    if operation.kind != "broadcast":
        return False
    (value,) = operation.operands
    literal = operations[value]
    return literal.kind == "literal" and is_number(cast("tuple[str, object]", literal.tag)[1], 0.0)
