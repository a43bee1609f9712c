"""Rules of reductions: kept dimensions pass through, reduced ones leave the result partial."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import cast

from passes.ir import Node
from passes.rules.registry import build, moved, rule
from passes.rules.sharding_rule import ShardingRule, Types
from passes.sharding import ANY

_KINDS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_and": "and",
    "any_row": ANY,
}


@rule(*_KINDS)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    axes = cast("tuple[int, ...]", node.params["axes"])
    rank = operands[0].rank
    kind = _KINDS[node.primitive]
    # Collectives have no logic: any of booleans is their maximum, all is their minimum; bits of integers have neither.
    joins = kind in ("add", "max", "min") or operands[0].dtype == "bool"
    cut: dict[Hashable, str] = dict.fromkeys(axes, kind) if joins else {}
    labels = [d if d in cut or d not in axes else None for d in range(rank)]
    base = build(
        [(operands[0], labels)],
        [(results[0], [d for d in range(rank) if d not in axes])],
        reduce=cut,
        linear=((0,),) if kind == "add" else (),
        flops=float(operands[0].size),
    )
    return replace(base, joins=tuple(kind if d in axes else "" for d in range(rank)))


@rule("argmax", "argmin")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The position of the element that is the second operand; without one, a dimension is looked through whole."""
    (axis,) = cast("tuple[int]", node.params["axes"])
    kept_dims = [d for d in range(operands[0].rank) if d != axis]
    labels = [d if d != axis or len(operands) == 2 else None for d in range(operands[0].rank)]
    taken = list(zip(operands, (labels, kept_dims), strict=False))
    base = build(taken, [(results[0], kept_dims)], reduce={axis: "min"}, flops=float(operands[0].size))
    return replace(base, localized=len(operands) == 2)


@rule("reduce_prod", "reduce_xor")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    axes = cast("tuple[int, ...]", node.params["axes"])
    kept_dims = [d for d in range(operands[0].rank) if d not in axes]
    labels = [d if d in kept_dims else None for d in range(operands[0].rank)]
    return build([(operands[0], labels)], [(t, kept_dims) for t in results], flops=float(operands[0].size))


@rule("reduce")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Arrays first, then the scalar that each reduction starts from; what combines them is the user's."""
    axes = cast("tuple[int, ...]", node.params["dimensions"])
    arrays, starts = operands[: len(results)], operands[len(results) :]
    kept_dims = [d for d in range(arrays[0].rank) if d not in axes]
    labels = [d if d in kept_dims else None for d in range(arrays[0].rank)]
    return build(
        [*((t, labels) for t in arrays), *((t, ()) for t in starts)],
        [(t, kept_dims) for t in results],
        flops=float(sum(t.size for t in arrays)),
    )


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    along = cast("int", node.params["axis"])
    labels = [None if d == along else d for d in range(operands[0].rank)]
    return build([(operands[0], labels)], [(results[0], labels)])


_SORTED = {"sort": "dimension", "top_k": "axis", "approx_top_k": "reduction_dimension"}


@rule(*_SORTED)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    rank = operands[0].rank
    along = cast("int", node.params[_SORTED[node.primitive]]) % rank
    labels = [None if d == along else d for d in range(rank)]
    base = build([(t, labels) for t in operands], [(t, labels) for t in results], light=False)
    return replace(base, moves=moved(along, operands=len(operands)))
