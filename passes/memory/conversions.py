"""Conversions to wider dtypes, which XLA's compilers for accelerators make late: of a slice and not of the whole.

So logits of which the last token's are left out are in memory as the product made them, and nowhere in full as float32.

Reference: the HLO that XLA:GPU of jaxlib 0.10 and libtpu 0.0.42 make of language models that predict the next token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from passes.ir import item_nbytes
from passes.memory.operations import Operation


def widens(operations: Sequence[Operation], index: int) -> bool:
    """Whether an operation only converts to a wider dtype."""
    return _gained_nbytes(operations, index) > 0


def narrows(operations: Sequence[Operation], index: int) -> bool:
    """Whether an operation only converts to a narrower dtype."""
    return _gained_nbytes(operations, index) < 0


def _gained_nbytes(operations: Sequence[Operation], index: int) -> int:
    """The bytes that a conversion adds to each element, 0 for any other operation."""
    operation = operations[index]
    if not operation.is_conversion:
        return 0
    return item_nbytes(operation.dtype) - item_nbytes(operations[operation.operands[0]].dtype)


def sliced_first(operations: Sequence[Operation], outputs: Iterable[int]) -> list[Operation]:
    """The operations with each slice of what is widened, if nothing else is read of it, before the widening."""
    readers = Counter(o for operation in operations for o in set(operation.operands))
    changed, returned = list(operations), frozenset(outputs)
    for index, operation in enumerate(operations):
        if operation.kind != "rearrange" or operation.name != "slice":
            continue
        (source,) = operation.operands
        widening = changed[source]
        if readers[source] == 1 and source not in returned and widens(changed, source):
            changed[source] = operation._replace(operands=widening.operands, dtype=changed[widening.operands[0]].dtype)
            changed[index] = widening._replace(operands=(source,), shape=operation.shape)
    return changed
