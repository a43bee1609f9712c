"""Sums of all-reduces as all-reduces of sums, as XLA's GPU compiler makes them.

The gradients of a table that is read twice are added before they are sent, in the dtype that they are added in: then
one array is sent, which may be twice as wide as each was.

Reference: XLA's AllReduceReassociate with `xla_gpu_enable_reassociation_for_converted_ar`, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from passes.memory.operations import Operation


def reassociated(operations: Sequence[Operation], outputs: Sequence[int]) -> tuple[list[Operation], list[int]]:
    """The operations with all-reduces behind sums, in a valid order, and the new position of each old one."""
    if not any(_adds_reduced(operations, operation) for operation in operations):
        return list(operations), list(range(len(operations)))
    readers = _readers(operations, outputs)
    changed: list[Operation] = []
    place: list[int] = []
    alone: list[bool] = []

    def sent(index: int) -> tuple[Operation, Operation | None] | None:
        """The all-reduce that only this operand is, and its conversion; None for anything else."""
        operand, conversion = changed[index], None
        if not alone[index]:
            return None
        if operand.is_conversion:
            (index,), conversion = operand.operands, operand
            operand = changed[index]
        return (operand, conversion) if alone[index] and operand.name == "all_reduce" else None

    def add(operation: Operation, *, is_alone: bool) -> int:
        changed.append(operation)
        alone.append(is_alone)
        return len(changed) - 1

    for index, operation in enumerate(operations):
        moved = operation.reading(tuple([place[o] for o in operation.operands]))
        sides = [sent(o) for o in moved.operands] if operation.name == "add" and len(moved.operands) == 2 else []
        pairs = [side for side in sides if side is not None]
        if len(pairs) == 2 and _alike(*pairs):
            summands = [
                reduced.operands[0]
                if conversion is None
                else add(conversion._replace(operands=reduced.operands), is_alone=True)
                for reduced, conversion in pairs
            ]
            summed = add(moved._replace(operands=tuple(summands)), is_alone=True)
            moved = pairs[0][0]._replace(operands=(summed,), shape=moved.shape, dtype=moved.dtype, value=moved.value)
        place.append(add(moved, is_alone=readers[index] == 1))
    return changed, place


def _adds_reduced(operations: Sequence[Operation], operation: Operation) -> bool:
    """Whether an operation adds what an all-reduce makes, converted or not."""
    if operation.kind != "elementwise" or operation.name != "add":
        return False
    read = [operations[o] for o in operation.operands]
    sources = [operations[o.operands[0]] if o.is_conversion else o for o in read]
    return any(source.kind == "collective" for source in sources)


def _readers(operations: Sequence[Operation], outputs: Sequence[int]) -> Counter[int]:
    """The number of readers of each operation, less those that no output needs."""
    readers = Counter(outputs)
    for index in reversed(range(len(operations))):
        if readers[index]:
            readers.update(operations[index].operands)
    return readers


def _alike(first: tuple[Operation, Operation | None], second: tuple[Operation, Operation | None]) -> bool:
    """Whether two all-reduces send sums along the same axes, both converted from one dtype or neither."""
    reduced, other = first[0], second[0]
    same = (reduced.tag, reduced.dtype, reduced.shape) == (other.tag, other.dtype, other.shape)
    return same and cast("tuple[object, ...]", reduced.tag)[2] == "add" and (first[1] is None) == (second[1] is None)
