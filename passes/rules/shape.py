"""Rules of primitives that move data without computing."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import cast

from passes.ir import Node
from passes.rules.registry import build, moved, rule
from passes.rules.sharding_rule import Factor, ShardingRule, Types


@rule("transpose")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    order = cast("tuple[int, ...]", node.params["permutation"])
    base = build([(operands[0], range(len(order)))], [(results[0], order)], linear=((0,),), flops=0.0)
    return replace(base, permutes=True)


@rule("squeeze")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    gone = cast("tuple[int, ...]", node.params["dimensions"])
    kept_dims = [d for d in range(operands[0].rank) if d not in gone]
    base = build([(operands[0], range(operands[0].rank))], [(results[0], kept_dims)], linear=((0,),), flops=0.0)
    return replace(base, regroups=True, single=_single(operands[0].shape, results[0].shape))


@rule("broadcast_in_dim", free=True)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    placed = cast("tuple[int, ...]", node.params["broadcast_dimensions"])
    labels = range(results[0].rank)
    base = build([(operands[0], placed)], [(results[0], labels)], linear=((0,),), flops=0.0)
    return replace(base, localized=True, shape_parameter="shape")


@rule("iota", free=True)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    return replace(build([], [(results[0], range(results[0].rank))]), localized=True)


@rule("reshape")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The major-most dimension of each merged or split group is shared; the rest of the group stays whole.

    A piece of the major dimension is contiguous on both sides.
    """
    order = cast("tuple[int, ...] | None", node.params.get("dimensions")) or tuple(range(operands[0].rank))
    before, after = tuple(operands[0].shape[d] for d in order), results[0].shape
    operand_labels: list[int | None] = [None] * len(before)
    result_labels: list[int | None] = [None] * len(after)
    sizes: dict[Hashable, int] = {}
    splits: list[tuple[int, int]] = []
    moves: list[tuple[int, int, int]] = []
    for group, (i, j) in enumerate(_major_pairs(before, after)):
        if j == 0 and after[0] < before[i]:
            splits.append((order[i], next(d for d in range(1, len(after)) if after[d] > 1)))
        minor = (d for d in range(i + 1, len(before)) if before[d] > 1 and math.prod(before[i : d + 1]) <= after[j])
        moves += [(0, order[d], j) for d in minor]
        operand_labels[order[i]] = result_labels[j] = group
        sizes[group] = min(before[i], after[j])
    base = build([(operands[0], operand_labels)], [(results[0], result_labels)], sizes=sizes, linear=((0,),), flops=0.0)
    is_in_order = order == tuple(range(len(order)))
    return replace(
        base,
        regroups=is_in_order,
        localized=True,
        shape_parameter="new_sizes",
        splits=tuple(splits),
        moves=tuple(moves),
        single=_single(before, after) if is_in_order else None,
    )


def _single(before: tuple[int, ...], after: tuple[int, ...]) -> ShardingRule | None:
    """The factors of dimensions of one element: those with as many elements before them go together.

    One that leads and is gone goes on in the dimension that leads then, as all rows of a batch would: in
    `with_single` it takes the place of that dimension's own factor, which is sound for one row in one microbatch alone.
    """
    there = _ones(after)
    wide = next((d for d, size in enumerate(after) if size > 1), -1)
    goes_to = {d: there.get(at, wide if at[0] == 1 else -1) for at, d in _ones(before).items()}
    numbers = {d: number for number, d in enumerate(sorted({*goes_to.values()} - {-1}))}
    operand = tuple(numbers.get(goes_to.get(d, -1), -1) for d in range(len(before)))
    result = tuple(numbers.get(d, -1) for d in range(len(after)))
    return ShardingRule(factors=(Factor(size=1),) * len(numbers), operands=(operand,), results=(result,))


def _ones(shape: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """(The elements before a dimension of one element, how many such stand just before it) -> the dimension."""
    places: dict[tuple[int, int], int] = {}
    elements, ones = 1, 0
    for d, size in enumerate(shape):
        if size == 1:
            places[elements, ones] = d
        elements, ones = elements * size, ones + 1 if size == 1 else 0
    return places


def _major_pairs(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, int]]:
    """The first dimension of size above 1 on either side of every group of dimensions with equal products."""
    if 0 in before or 0 in after:
        return []
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        if before[i] == 1:
            i += 1
        elif after[j] == 1:
            j += 1
        else:
            first = (i, j)
            size_before, size_after = before[i], after[j]
            while size_before != size_after:
                if size_before < size_after:
                    i += 1
                    size_before *= before[i]
                else:
                    j += 1
                    size_after *= after[j]
            # Cutting by k cuts both majors only if one is a multiple of the other.
            small, large = sorted((before[first[0]], after[first[1]]))
            if large % small == 0:
                pairs.append(first)
            i, j = i + 1, j + 1
    return pairs


@rule("slice")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Dimensions that keep their size pass through; those that are cut short stay whole.

    One element of a dimension lies on one device, and is a sum to which the others add zeros.
    """
    pairs = list(zip(operands[0].shape, results[0].shape, strict=True))
    labels = [d if a == b else None for d, (a, b) in enumerate(pairs)]
    summable = results[0].is_inexact or results[0].is_integer
    single = {d: f"at{d}" for d, (a, b) in enumerate(pairs) if summable and a > b == 1}
    source = [single.get(d, label) for d, label in enumerate(labels)]
    base = build(
        [(operands[0], source)],
        [(results[0], labels)],
        reduce=dict.fromkeys(single.values(), "add"),
        linear=((0,),),
        flops=0.0,
    )
    moves = moved(*(d for d, (a, b) in enumerate(pairs) if a > b > 1))
    cut = [d for d, (a, b) in enumerate(pairs) if a > b]
    picks = all(results[0].shape[d] == 1 for d in cut) and cut == [*range(len(cut))]
    return replace(base, localized=True, slices=True, picks=picks, moves=moves)


@rule("rev")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    turned = cast("tuple[int, ...]", node.params["dimensions"])
    labels = [None if d in turned else d for d in range(operands[0].rank)]
    base = build([(operands[0], labels)], [(results[0], labels)], linear=((0,),), flops=0.0)
    return replace(base, moves=moved(*turned))


@rule("pad")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    config = cast("tuple[tuple[int, int, int], ...]", node.params["padding_config"])
    # Padding by -1 and 1 keeps the size too, and moves every element.
    labels = [None if any(padding) else d for d, padding in enumerate(config)]
    base = build([(operands[0], labels), (operands[1], ())], [(results[0], labels)], linear=((0, 1),), flops=0.0)
    return replace(base, moves=moved(*(d for d, padding in enumerate(config) if any(padding))))


@rule("concatenate")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    along = cast("int", node.params["dimension"])
    labels = [None if d == along else d for d in range(results[0].rank)]
    every = tuple(range(len(operands)))
    base = build([(t, labels) for t in operands], [(results[0], labels)], linear=(every,), flops=0.0)
    return replace(base, moves=moved(along, operands=len(operands)))


@rule("stack")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    rank, every = operands[0].rank, tuple(range(len(operands)))
    along = cast("int", node.params["axis"]) % (rank + 1)
    labels = [*range(along), None, *range(along, rank)]
    return build([(t, range(rank)) for t in operands], [(results[0], labels)], linear=(every,), flops=0.0)


@rule("unstack")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    rank = operands[0].rank - 1
    along = cast("int", node.params["axis"]) % (rank + 1)
    labels = [*range(along), None, *range(along, rank)]
    base = build([(operands[0], labels)], [(t, range(rank)) for t in results], linear=((0,),), flops=0.0)
    return replace(base, picks=along == 0)


@rule("split")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    along = cast("int", node.params["axis"])
    labels = [None if d == along else d for d in range(operands[0].rank)]
    base = build([(operands[0], labels)], [(t, labels) for t in results], linear=((0,),), flops=0.0)
    return replace(base, moves=moved(along))


@rule("tile")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    repeats = cast("tuple[int, ...]", node.params["reps"])
    labels = [d if count == 1 else None for d, count in enumerate(repeats)]
    base = build([(operands[0], labels)], [(results[0], labels)], linear=((0,),), flops=0.0)
    return replace(base, moves=moved(*(d for d, count in enumerate(repeats) if count > 1)))


@rule("device_put")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The plan says where values live; several may be put at once."""
    labels = [[(i, d) for d in range(t.rank)] for i, t in enumerate(operands)]
    base = build(
        list(zip(operands, labels, strict=True)),
        list(zip(results, labels, strict=True)),
        linear=(tuple(range(len(operands))),),
        flops=0.0,
    )
    return replace(base, places=("devices", "srcs"))
