"""Rules of primitives that public libraries bind: Equinox, and Diffrax and Lineax through it."""

from __future__ import annotations

from collections.abc import Hashable

from passes.ir import Node
from passes.rules.elementwise import pointwise
from passes.rules.registry import build, rule
from passes.rules.sharding_rule import ShardingRule, Types

_UNVMAPPED = {"unvmap_any": "or", "unvmap_all": "and", "unvmap_max": "max"}


@rule(*_UNVMAPPED)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    labels = range(operands[0].rank)
    reduce: dict[Hashable, str] = dict.fromkeys(labels, _UNVMAPPED[node.primitive])
    return build([(operands[0], labels)], [(results[0], ())], reduce=reduce, flops=float(operands[0].size))


@rule("nonbatchable", "select_if_vmap")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The choice of a scalar, which stands before what it chooses from, or of nothing."""
    return pointwise(operands, results)


@rule("platform_index")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    return build([], [(results[0], ())], flops=0.0)
