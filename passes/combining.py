"""All-reduces that XLA sends as one: those along the same axes that do not wait for each other.

One that is combined runs once everything that it sends is there, and everything that it sends is in memory until then.

Reference: XLA's AllReduceCombiner, whose thresholds the CPU compiler does not use, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from passes.operations import Operation


def combined(operations: Sequence[Operation]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with all-reduces combined, in an order that still works, and where each of the old ones went."""
    groups = [members for members in _groups(operations) if len(members) > 1]
    if not groups:
        return tuple(operations), tuple(range(len(operations)))
    sent = list(operations)
    for members in groups:
        reads = tuple(operations[m].operands[0] for m in members)
        joint = len(sent)
        first = operations[members[-1]]
        sent.append(replace(first, operands=reads, shape=(0,), value=-1, tag=("combined", joint)))
        for m in members:
            sent[m] = replace(operations[m], kind="result", operands=(joint,))
    order = _sorted(sent)
    if len(order) < len(sent):  # two groups wait for each other
        return tuple(operations), tuple(range(len(operations)))
    place = {old: new for new, old in enumerate(order)}
    moved = tuple(_reading(sent[old], tuple([place[o] for o in sent[old].operands])) for old in order)
    return moved, tuple(place[old] for old in range(len(operations)))


def _reading(operation: Operation, operands: tuple[int, ...]) -> Operation:
    """The same operation of other operands; `replace` would take several times as long, and a program has many."""
    if operands == operation.operands:
        return operation
    return Operation(
        kind=operation.kind,
        operands=operands,
        shape=operation.shape,
        dtype=operation.dtype,
        node=operation.node,
        value=operation.value,
        tag=operation.tag,
    )


def _groups(operations: Sequence[Operation]) -> list[list[int]]:
    """All-reduces by axes, reduction and dtype, each in the first group that it does not depend on."""
    groups: list[list[int]] = []
    keyed: dict[object, list[int]] = {}
    upstream: list[int] = []
    for index, operation in enumerate(operations):
        behind = 0
        for o in operation.operands:
            behind |= upstream[o]
        if _is_all_reduce(operation):
            candidates = keyed.setdefault((operation.tag, operation.dtype), [])
            free = next((g for g in candidates if not behind >> g & 1), None)
            if free is None:
                free = len(groups)
                groups.append([])
                candidates.append(free)
            groups[free].append(index)
            behind |= 1 << free
        upstream.append(behind)
    return groups


def _is_all_reduce(operation: Operation) -> bool:
    return operation.kind == "collective" and operation.name == "all_reduce"


def _sorted(operations: Sequence[Operation]) -> list[int]:
    """The operations so that each comes after what it reads, early ones first; short of some if they go in circles."""
    readers: list[list[int]] = [[] for _ in operations]
    waiting = [len(operation.operands) for operation in operations]
    for index, operation in enumerate(operations):
        for o in operation.operands:
            readers[o].append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order
