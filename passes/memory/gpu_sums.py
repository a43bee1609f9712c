"""Long columns that XLA's GPU compiler adds up in parts: one kernel for the sums of all parts, another one for these.

The first is one with what makes the columns, the second is small and waits for nothing else. What a sum is converted to
is written by its own kernel.

Reference: TreeReductionRewriter (xla/service/gpu/transforms/tree_reduction_rewriter.cc), as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import cast

from passes.memory.gpu_blocks import ADDED, COLUMN, grouped
from passes.memory.operations import Operation, Shape


def in_parts(operations: Sequence[Operation], outputs: Collection[int]) -> tuple[list[Operation], list[int]]:
    """The operations with sums of long columns in two steps, and the new position of each old one."""
    converted = _converted(operations, outputs)
    changed, place = list[Operation](), list[int]()
    for index, operation in enumerate(operations):
        moved = operation.reading(tuple([place[o] for o in operation.operands]))
        if index in converted:
            moved = moved._replace(dtype=operations[converted[index]].dtype)
        elif operation.is_conversion and converted.get(operation.operands[0]) == index:
            moved = moved._replace(kind="bitcast", tag=None)
        if sizes := _sizes(operation, operations):
            moved = _added(moved, sizes, changed)
        place.append(len(changed))
        changed.append(moved)
    return changed, place


def _converted(operations: Sequence[Operation], outputs: Collection[int]) -> dict[int, int]:
    """The sums that are read only to be converted, and what does that."""
    read = Counter(o for operation in operations for o in operation.operands)
    conversions = ((i, *o.operands) for i, o in enumerate(operations) if o.is_conversion)
    return {
        made: index
        for index, made in conversions
        if operations[made].name in ADDED and read[made] == 1 and made not in outputs
    }


def _sizes(operation: Operation, operations: Sequence[Operation]) -> tuple[int, int, int, int] | None:
    """The elements before a long column that is added up, its parts, the elements of each and those behind it."""
    if operation.kind != "reduce" or operation.name not in ADDED:
        return None
    read = operations[operation.operands[0]]
    major, added, minor = grouped(operation, read)
    if minor == 1 or added <= COLUMN or major * added * minor != read.size:
        return None
    parts = next((n for n in range(math.isqrt(added), 1, -1) if added % n == 0), 1)
    return (major, parts, added // parts, minor) if parts > 1 else None


def _added(operation: Operation, sizes: tuple[int, int, int, int], changed: list[Operation]) -> Operation:
    """The sum of the sums of all parts, which are added to the operations."""
    (read,) = operation.operands
    name, _ = cast("tuple[str, Shape]", operation.tag)
    major, parts, _, minor = sizes
    source = changed[read]
    view = source._replace(kind="bitcast", operands=(read,), shape=sizes, tag=None, value=-1)
    changed.append(view)
    summed = operation._replace(
        operands=(len(changed) - 1,), shape=(major, parts, minor), dtype=source.dtype, tag=(name, (2,)), value=-1
    )
    changed.append(summed)
    return operation._replace(operands=(len(changed) - 1,), tag=(name, (1,)))
