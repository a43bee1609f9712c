"""Products of one array with several others, of which XLA's GPU compiler makes one product with them side by side.

So queries, keys and values are one array, in memory until the last of them is read, and so are the gradients of their
weights. A product's kernel reads sides of which each has whole tiles from where they are; others are joined first.
Products of more than 64 MiB, with what they read, are left alone unless they meet a smaller one.

Reference: DotMerger of xla/hlo/transforms/simplifiers/dot_merger.cc with `xla_gpu_dot_merger_threshold_mb` at its
default, and `kMinConcatFragmentSize` of triton_tiling_propagation.cc, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from passes.memory.all_reduces import in_order, mask_of
from passes.memory.operations import Operation, Shape

JOINED_NBYTES = 64 * 2**20
"""The bytes of a product and what it reads up to which it is joined with others: by jaxlib 0.10.2, products of 62 MiB
are joined for A100 and H100, and those of 69 are not."""

FRAGMENT = 64
"""Rows or columns of which a joined side has a multiple where a product's kernel reads it from its own place."""


def joint(operations: Sequence[Operation]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with products of a common side as slices of one, in a valid order, and the new position of each
    old one.
    """
    changed = list(operations)
    for side, members in _groups(operations):
        _join(changed, side, members)
    return in_order(operations, changed)


def _groups(operations: Sequence[Operation]) -> Iterator[tuple[int, list[int]]]:
    """The side that products have in common, and the products, none of which waits for another."""
    keyed: dict[object, list[int]] = {}
    for index, dot in enumerate(operations):
        if dot.kind == "dot" and len(dot.operands) == 2 and dot.operands[0] != dot.operands[1]:
            for side, o in enumerate(dot.operands):
                other = operations[dot.operands[1 - side]]
                if (axis := _free(dot, other, 1 - side)) >= 0:
                    rest = other.shape[:axis] + other.shape[axis + 1 :]
                    key = side, o, _numbers(dot), dot.dtype, other.dtype, rest
                    keyed.setdefault(key, []).append(index)
    candidates = [(cast("tuple[int, ...]", key)[0], members) for key, members in keyed.items() if len(members) > 1]
    every = sorted({m for _, members in candidates for m in members})
    bits, waits = {m: 1 << bit for bit, m in enumerate(every)}, dict[int, int]()
    for index, operation in enumerate(operations if every else ()):
        waits[index] = mask_of(operation.operands, waits, bits)
    behind, joined = {m: waits[m] for m in every}, set[int]()
    for side, members in candidates:
        group = list[int]()
        for m in members:
            if m in joined or not (group or _is_small(operations, m)):
                continue
            both = bits[m] | sum(bits[g] for g in group)
            if not any(behind[g] & both for g in (*group, m)):
                group.append(m)
                _wait_together(behind, bits, group)
        if len(group) > 1:
            joined.update(group)
            yield side, group


def _wait_together(behind: dict[int, int], bits: dict[int, int], group: Sequence[int]) -> None:
    """Makes products wait for all that one of a group waits for, and what waits for one of them for all."""
    both = sum(bits[g] for g in group)
    before = 0
    for g in group:
        before |= behind[g]
    for m, mask in behind.items():
        if bits[m] & both:
            behind[m] = before
        elif mask & both:
            behind[m] = mask | both | before


def _is_small(operations: Sequence[Operation], index: int) -> bool:
    dot = operations[index]
    return dot.nbytes + sum(operations[o].nbytes for o in dot.operands) <= JOINED_NBYTES


def _numbers(dot: Operation) -> object:
    """The dimensions of a product, by which it is told from others."""
    return "merged" if dot.name == "merged" else dot.tag


def _free(dot: Operation, operand: Operation, side: int) -> int:
    """The only dimension of a side that is neither contracted nor of the batch, -1 if there are several."""
    if dot.name == "merged":
        return len(operand.shape) - 2 + side
    contracted, batch = cast("tuple[tuple[Shape, Shape], tuple[Shape, Shape]]", dot.tag)
    free = [d for d in range(len(operand.shape)) if d not in contracted[side] and d not in batch[side]]
    return free[0] if len(free) == 1 else -1


def _join(changed: list[Operation], side: int, members: Sequence[int]) -> None:
    """Makes products slices of one with a side of theirs in common; it is added."""
    first = changed[members[0]]
    parts = [changed[m].operands[1 - side] for m in members]
    axis = _free(first, changed[parts[0]], 1 - side)
    sizes = [changed[o].shape[axis] for o in parts]
    if any(size % FRAGMENT for size in sizes):
        beside = changed[parts[0]]
        shape = (*beside.shape[:axis], sum(sizes), *beside.shape[axis + 1 :])
        tag = ("concatenate", axis)
        changed.append(beside._replace(kind="rearrange", operands=tuple(parts), shape=shape, value=-1, tag=tag))
        parts = [len(changed) - 1]
    rank = len(first.shape)
    made = rank - 1 if side == 0 else rank - 2
    shape = (*first.shape[:made], sum(sizes), *first.shape[made + 1 :])
    common = first.operands[side]
    operands = (common, *parts) if side == 0 else (*parts, common)
    product = len(changed)
    changed.append(first._replace(operands=operands, shape=shape, value=-1))
    for m in members:
        changed[m] = changed[m]._replace(kind="rearrange", operands=(product,), tag=("slice", m))
