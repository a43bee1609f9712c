"""The all-reduces that XLA combines into one: those along the same axes that do not wait for each other.

One that is combined runs once everything that it sends is there, and everything that it sends is in memory until then.

Reference: XLA's AllReduceCombiner, whose thresholds the CPU compiler does not use, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from passes.memory.operations import Operation


def combined(operations: Sequence[Operation]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with all-reduces combined, in a valid order, and the new position of each old one."""
    groups = [members for members in _groups(operations) if len(members) > 1]
    if not groups:
        return tuple(operations), tuple(range(len(operations)))
    sent = list(operations)
    for members in groups:
        reads = tuple(operations[m].operands[0] for m in members)
        joint = len(sent)
        first = operations[members[-1]]
        addresses = (len(reads),)  # of what it makes, which is in memory as well
        sent.append(first._replace(operands=reads, shape=addresses, dtype="uint64", value=-1, tag=("combined", joint)))
        for m in members:
            sent[m] = operations[m]._replace(kind="result", operands=(joint,))
    order = _sorted(sent)
    if len(order) < len(sent):  # two groups wait for each other
        return tuple(operations), tuple(range(len(operations)))
    place = [0] * len(order)
    for new, old in enumerate(order):
        place[old] = new
    moved = [_reading(sent[old], tuple([place[o] for o in sent[old].operands])) for old in order]
    return tuple(moved), tuple(place[: len(operations)])


def _reading(operation: Operation, operands: tuple[int, ...]) -> Operation:
    """The operation with other operands."""
    return operation if operands == operation.operands else Operation(operation.kind, operands, *operation[2:])


def _groups(operations: Sequence[Operation]) -> list[list[int]]:
    """Groups of all-reduces of equal axes, reduction and dtype, each in the first group that it does not depend on."""
    groups: list[list[int]] = []
    keyed: dict[object, list[int]] = {}
    upstream: list[int] = []
    for index, operation in enumerate(operations):
        behind = 0
        for o in operation.operands:
            behind |= upstream[o]
        if operation.kind == "collective" and operation.name == "all_reduce":
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


def _sorted(operations: Sequence[Operation]) -> list[int]:
    """The operations in an order where each follows what it reads, early ones first; incomplete if there is a cycle.

    Most are in order as they are: those that are not wait for the first operand that is missing.
    """
    done = bytearray(len(operations))
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    for begun in range(len(operations)):
        ready = [begun]
        while ready:
            index = heapq.heappop(ready)
            for operand in operations[index].operands:
                if not done[operand]:
                    waiting.setdefault(operand, []).append(index)
                    break
            else:
                done[index] = True
                order.append(index)
                for reader in waiting.pop(index, ()):
                    heapq.heappush(ready, reader)
    return order
