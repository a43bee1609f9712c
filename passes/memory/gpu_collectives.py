"""The collectives of a program as XLA's GPU compiler joins them, up to 30 MiB at a time.

All-reduces of one dtype are laid side by side first, reduced in that place, and cut apart by what reads them;
all-gathers and reduce-scatters are sent together from where they are.

Reference: XLA's AllReduceCombiner, AllGatherCombiner, ReduceScatterCombiner and AllReduceContiguous, with
`xla_gpu_all_reduce_combine_threshold_bytes` and its like at their defaults, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from passes.memory.all_reduces import groups, in_order, join
from passes.memory.operations import Operation

COMBINED_NBYTES = 30 * 2**20
COMBINED = 256
"""The bytes and the number of tensors that are sent as one at most."""


def combined(operations: Sequence[Operation]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with collectives combined, in a valid order, and the new position of each old one."""
    joined = list(operations)
    for members in groups(operations, _key):
        for part in _parts(operations, members):
            if len(part) > 1 and operations[part[0]].name == "all_reduce":
                _lay_out(joined, part)
            elif len(part) > 1:
                join(joined, part)
    return in_order(operations, joined)


def _key(operation: Operation) -> object:
    """The key of collectives that may be one."""
    if operation.name == "all_reduce":
        return operation.tag, operation.dtype
    if operation.name in ("all_gather", "reduce_scatter"):
        return cast("tuple[object, ...]", operation.tag)[:3]
    return None


def _parts(operations: Sequence[Operation], members: Sequence[int]) -> Iterator[list[int]]:
    """The members in parts that are sent as one."""
    part: list[int] = []
    nbytes = 0
    for member in members:
        if part and (nbytes + operations[member].nbytes > COMBINED_NBYTES or len(part) == COMBINED):
            yield part
            part, nbytes = [], 0
        part.append(member)
        nbytes += operations[member].nbytes
    if part:
        yield part


def _lay_out(operations: list[Operation], members: Sequence[int]) -> None:
    """Makes all-reduces cuts of one, of an array in which they lie side by side; both are added."""
    last, reads = operations[members[-1]], tuple(operations[m].operands[0] for m in members)
    elements = (sum(operations[m].size for m in members),)
    beside = len(operations)
    operations.append(
        last._replace(kind="opaque", operands=reads, shape=elements, value=-1, tag=("concatenate", beside))
    )
    operations.append(last._replace(operands=(beside,), shape=elements, value=-1, tag=("all_reduce", beside)))
    for m in members:
        operations[m] = operations[m]._replace(kind="rearrange", operands=(beside + 1,), tag=("slice", m))
