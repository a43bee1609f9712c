"""The operations of a loop that XLA moves out of it, since they are the same in every iteration.

Reference: XLA's WhileLoopInvariantCodeMotion, which the CPU compiler runs without a limit on sizes.
"""

from __future__ import annotations

from collections.abc import Collection

from passes.memory.operations import Operation, Operations
from passes.memory.products import as_they_lie

IN_PLACE = frozenset({"literal", "bitcast", "broadcast", "iota", "transpose"})
"""Kinds that XLA leaves inside a loop though they do not change there, as it does with slices."""

FIXTURES = frozenset({"input", "carry", "fresh", "loop", "part", "result", "update"})
"""Kinds that stay where they are: what comes from outside, loops and what they fill."""


HOISTED = "hoisted"
"""The name of an input that is the same in every iteration, whether it was moved out of the loop or comes from outside:
it lies in whatever order the loop reads it."""


def hoisted(lowered: Operations, same: set[int], outputs: Collection[int]) -> tuple[list[Operation], list[int]]:
    """The operations of a loop with those that are the `same` in every iteration as inputs, and those inputs' numbers.

    What is left in place reads what was moved out, as a transposed view of a gathered weight does. Where a transpose
    reads what was widened for a convolution, XLA widens it afterwards, and so moves both.
    """
    given, moved, operations = frozenset(same), set[int](), lowered.every
    for index, operation in enumerate(operations):
        if operation.kind not in FIXTURES and same.issuperset(operation.operands):
            same.add(index)
            is_view = operation.kind in IN_PLACE or operation.name in ("slice", "reverse")
            is_widened = operation.kind == "transpose" and operations[operation.operands[0]].is_conversion
            if is_widened or not is_view:
                moved.add(index)
    operations = as_they_lie(operations, lowered.lying, moved)
    replaced, read, remaining = list(operations), set(outputs), set[int]()
    for index in reversed(range(len(operations))):
        if index in moved and index in read:
            remaining.add(index)
            replaced[index] = operations[index]._replace(kind="input", operands=(), tag=(HOISTED, index))
        elif index in given:
            replaced[index] = operations[index]._replace(tag=(HOISTED, index))
        elif index not in moved and (index in read or index not in same):
            read.update(operations[index].operands)
    return replaced, sorted(remaining)
