"""The layouts in which windows are reduced: where a collective sends the result alone, the one that it is sent in.

Reference: XLA's LayoutAssignment, which takes the layout of an operand back to what makes it, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from passes.memory.all_reduces import in_order
from passes.memory.operations import Operation, Shape
from passes.memory.windows import REDUCED


def laid_out(operations: Sequence[Operation]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with transposes of reduced windows as transposes of what is reduced, and the new position of each
    old one.
    """
    readers = Counter(o for operation in operations for o in operation.operands)
    changed = list(operations)
    for operation in operations:
        if operation.kind != "collective" or len(operation.operands) != 1:
            continue
        (sent,) = operation.operands
        transposed = changed[sent]
        if transposed.kind != "transpose":
            continue
        (made,) = transposed.operands
        reduced = operations[made]
        if not reduced.name.startswith(REDUCED) or readers[made] != 1:
            continue
        (source,), order = reduced.operands, cast("Shape", transposed.tag)
        shape = tuple(operations[source].shape[d] for d in order)
        changed.append(reduced._replace(kind="transpose", operands=(source,), shape=shape, tag=order))
        changed[sent] = reduced._replace(operands=(len(changed) - 1,), shape=transposed.shape)
    return in_order(operations, changed)
