"""The all-reduces that XLA combines into one: those along the same axes that do not wait for each other.

One that is combined runs once everything that it sends is there, and everything that it sends is in memory until then.

Reference: XLA's AllReduceCombiner, whose thresholds the CPU compiler does not use, as of jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from passes.memory.kernel_graph import post_order
from passes.memory.operations import Operation


def combined(operations: Sequence[Operation], _: Sequence[int] = ()) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with all-reduces combined, in a valid order, and the new position of each old one."""
    joined = list(operations)
    for members in groups(operations, lambda o: (o.tag, o.dtype) if o.name == "all_reduce" else None):
        if len(members) > 1:
            join(joined, members)
    return in_order(operations, joined)


def combined_as_visited(
    operations: Sequence[Operation], outputs: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with all-reduces combined as the outputs come to them, in a valid order, and the new position of
    each old one.

    The first one that is not combined yet begins, and the next ones of its key follow until one waits for one that is
    there. Their results are in the order of the program, by which kernels are scheduled.
    """
    keys = {i: (o.tag, o.dtype) for i, o in enumerate(operations) if o.kind == "collective" and o.name == "all_reduce"}
    bits = {m: 1 << bit for bit, m in enumerate(keys)}
    masks: dict[int, int] = {}
    for index, operation in enumerate(operations):
        masks[index] = mask_of(operation.operands, masks, bits)
    behind = {m: masks[m] for m in bits}

    def first(members: Sequence[int]) -> list[int]:
        part, joint = [members[0]], bits[members[0]]
        for m in members[1:]:
            if keys[m] != keys[members[0]]:
                continue
            if behind[m] & joint:
                break
            part.append(m)
            joint |= bits[m]
        return part

    joined = list(operations)
    for part in parts(list(operations), outputs, list(keys), behind, bits, first):
        join(joined, sorted(part))
    return in_order(operations, joined)


def parts(
    kernels: list[Operation],
    outputs: Sequence[int],
    members: Iterable[int],
    behind: dict[int, int],
    bits: Mapping[int, int],
    first: Callable[[Sequence[int]], list[int]],
) -> Iterator[list[int]]:
    """The collectives that are sent as one, two or more: the `first` of those `members` that are left, in the order in
    which the outputs come to them, which is another one once some are joined.

    `behind` has what each member waits for, as their `bits`; it is kept up to date, and so are the `kernels`.
    """
    place = post_order(kernels, outputs)
    waiting = sorted((m for m in members if place[m] >= 0), key=place.__getitem__)
    while waiting:
        part = first(waiting)
        waiting = [m for m in waiting if m not in part]
        if len(part) == 1:
            continue
        yield part
        before = _wait(behind, bits, part)
        join(kernels, part)
        if any(bits[m] & before for m in waiting):  # those come to be visited earlier
            place = post_order(kernels, outputs)
            waiting.sort(key=place.__getitem__)


def mask_of(read: Sequence[int], waits: Mapping[int, int], bits: Mapping[int, int]) -> int:
    """The bits of what waits for some operations."""
    mask = 0
    for o in read:
        mask |= waits[o] | bits.get(o, 0)
    return mask


def _wait(behind: dict[int, int], bits: Mapping[int, int], part: Sequence[int]) -> int:
    """The bits of a part and of what it waits for; collectives that wait for some of it wait for all that now."""
    joint = sum(bits[m] for m in part)
    before = joint
    for m in part:
        before |= behind[m]
    for m, mask in behind.items():
        if mask & joint or m in part:
            behind[m] = mask | before
    return before


def join(operations: list[Operation], members: Sequence[int]) -> None:
    """Makes collectives the results of one, which is added."""
    reads = tuple(operations[m].operands[0] for m in members)
    joint, last = len(operations), operations[members[-1]]
    addresses = (len(reads),)  # of what it makes, which is in memory as well
    operations.append(last._replace(operands=reads, shape=addresses, dtype="uint64", value=-1, tag=("combined", joint)))
    for m in members:
        operations[m] = operations[m]._replace(kind="result", operands=(joint,))


def in_order(
    operations: Sequence[Operation], changed: Sequence[Operation]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The changed operations, of which some were added, in a valid order, and the new position of each old one.

    The operations as they were where there is no such order: two groups wait for each other.
    """
    order = _sorted(changed) if len(changed) > len(operations) else ()
    if len(order) < len(changed):
        return tuple(operations), tuple(range(len(operations)))
    place = [0] * len(order)
    for new, old in enumerate(order):
        place[old] = new
    moved = [changed[old].reading(tuple([place[o] for o in changed[old].operands])) for old in order]
    return tuple(moved), tuple(place[: len(operations)])


def groups(operations: Sequence[Operation], key_of: Callable[[Operation], object]) -> list[list[int]]:
    """Groups of collectives of equal keys, each in the first group that it does not depend on; None is no key."""
    groups: list[list[int]] = []
    keyed: dict[object, list[int]] = {}
    upstream: list[int] = []
    for index, operation in enumerate(operations):
        behind = 0
        for o in operation.operands:
            behind |= upstream[o]
        if operation.kind == "collective" and (key := key_of(operation)) is not None:
            candidates = keyed.setdefault(key, [])
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
