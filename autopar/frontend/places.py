"""Joins and positions: how nodes join arrays and take them apart, and along which factors the index of an element
matters.

z = concatenate([x, y])      Whole(z, 0, is_join=True, parts=(Part(x, 0, begin=0, ...), Part(y, 0, begin=len(x), ...)))
x = slice(z, 0, 4)           Whole(z, 0, is_join=False, parts=(Part(x, 0, begin=0, extent=4),))
z = reshape(x, (2 * 8, 3))   for x of (2, 8, 3): two parts of 8, the second dimension of x for each element of its first
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from passes.ir import Graph, Node
from passes.rules import ShardingRule

MOST_PARTS = 64
"""The most elements of a dimension that a reshape merges with the next, for it to be a stack of batches: several times
the views of an image in multi-crop training (Caron et al. 2020, "SwAV": 2 + 6), and far fewer than dimensions of
weights have, which are merged too."""


class Part(NamedTuple):
    """The dimension `dim` of a value as a part of a whole: `extent` elements of the whole, from element `begin` on.

    Each element of the part is `scale` elements of the whole.
    """

    value: int
    dim: int
    begin: int
    extent: int
    scale: int = 1


class Whole(NamedTuple):
    """The dimension `dim` of a value that a node joins of `parts` (`is_join`), or takes apart into them."""

    value: int
    dim: int
    is_join: bool
    parts: tuple[Part, ...]


def wholes_of(graph: Graph, node: Node, groups: int) -> Iterator[Whole]:
    """The dimensions along which a node joins values, or takes one apart.

    A reshape that merges dimensions joins what lies along the second, once for each element of the first, unless the
    first is itself one of so many `groups` or a multiple.
    """
    before, after = ([graph.types[value].shape for value in values] for values in (node.inputs, node.outputs))
    match node.primitive:
        case "concatenate" | "split":
            along, is_join = _dimension(node), node.primitive == "concatenate"
            (whole, *_), parts = (node.outputs, node.inputs) if is_join else (node.inputs, node.outputs)
            extents = [graph.types[part].shape[along] for part in parts]
            begins = [0, *itertools.accumulate(extents)]
            placed = zip(parts, begins, extents, strict=False)
            yield Whole(whole, along, is_join, tuple(Part(v, along, at, n) for v, at, n in placed))
        case "slice":
            starts = cast("tuple[int, ...]", node.params["start_indices"])
            strides = cast("tuple[int, ...] | None", node.params["strides"]) or (1,) * len(starts)
            for d, (begin, stride) in enumerate(zip(starts, strides, strict=True)):
                if before[0][d] > after[0][d] and stride == 1:
                    yield Whole(node.inputs[0], d, False, (Part(node.outputs[0], d, begin, after[0][d]),))
        case "pad":
            config = cast("tuple[tuple[int, int, int], ...]", node.params["padding_config"])
            for d, (low, high, between) in enumerate(config):
                if min(low, high) >= 0 and low + high and not between:
                    yield Whole(node.outputs[0], d, True, (Part(node.inputs[0], d, low, before[0][d]),))
        case "reshape" if not node.params["dimensions"]:
            merged = [(node.outputs[0], node.inputs[0], m) for m in _merges(before[0], after[0])]
            parted = [(node.inputs[0], node.outputs[0], m) for m in _merges(after[0], before[0])]
            for whole, value, (several, dim) in merged or parted:
                count, extent, *rest = (graph.types[value].shape[d] for d in several)
                if count % groups and count <= MOST_PARTS:
                    scale = math.prod(rest)
                    begins = range(0, count * extent * scale, extent * scale)
                    each = tuple(Part(value, several[1], begin, extent * scale, scale) for begin in begins)
                    yield Whole(whole, dim, bool(merged), each)
        case _:
            return


def _merges(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """(dimensions that a reshape merges, the dimension that they become), without dimensions of one element."""
    wide, whole = ([d for d, size in enumerate(shape) if size > 1] for shape in (before, after))
    while wide and whole and 0 not in before:
        several, ours = [wide.pop(0)], [whole.pop(0)]
        while (made := math.prod(before[d] for d in several)) != (taken := math.prod(after[d] for d in ours)):
            (several if made < taken else ours).append((wide if made < taken else whole).pop(0))
        if len(several) > 1 and len(ours) == 1:
            yield several, ours[0]


def _dimension(node: Node) -> int:
    """The dimension along which a node joins arrays, or splits one."""
    return cast("int", node.params["dimension" if node.primitive == "concatenate" else "axis"])


def place_factors(node: Node, rule: ShardingRule) -> frozenset[int]:
    """The factors of a node along which the index of an element matters, as for a cumulative sum."""
    every = frozenset(range(len(rule.factors)))
    if rule.is_bound:
        return every
    if not rule.localized or rule.shape_parameter or rule.convolves:
        return frozenset()
    first = frozenset((*rule.operands, *rule.results)[0])
    match node.primitive:
        case "iota":
            dimension = node.params["dimension"]
            return frozenset(f for d, f in enumerate(rule.results[0]) if d == dimension)
        case "slice" | "gather" | "argmax" | "argmin":
            return first.difference(*rule.results)
        case "dynamic_update_slice":
            return first.difference(rule.operands[1])
        case name if name.startswith("scatter"):
            return first.difference(*rule.operands[1:])
        case "random_bits":
            return every.difference(*rule.operands)
        case _:
            return every
