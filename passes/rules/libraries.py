"""Rules of primitives that public libraries bind: Equinox, and Diffrax and Lineax through it."""

from __future__ import annotations

from collections.abc import Hashable

from passes.ir import Node
from passes.rules.elementwise import pointwise
from passes.rules.registry import ShardingRule, Types, build, rule


@rule("unvmap_any", "unvmap_all")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Booleans are summed in no dtype that collectives have: these few are taken whole."""
    (flags,) = operands
    return build([(flags, [None] * flags.rank)], [(results[0], ())], flops=float(flags.size))


@rule("unvmap_max")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    labels = range(operands[0].rank)
    reduce: dict[Hashable, str] = dict.fromkeys(labels, "max")
    return build([(operands[0], labels)], [(results[0], ())], reduce=reduce, flops=float(operands[0].size))


@rule("nonbatchable", "select_if_vmap")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The choice of a scalar, which stands before what it chooses from, or of nothing."""
    return pointwise(operands, results)


@rule("platform_index")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    return build([], [(results[0], ())], flops=0.0)
