"""Rules of callbacks: each runs once, on one device, on whole operands, as in a program of one device.

The device hands out what a callback returns as a sum to which the others add nothing.
"""

from __future__ import annotations

from dataclasses import replace

from passes.ir import CALLBACKS, Node
from passes.rules.registry import known_primitives, replicate, rule
from passes.rules.sharding_rule import Factor, ShardingRule, Types


@rule(*sorted(CALLBACKS))
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    base = replicate(operands, results, "a callback runs once, on whole operands")
    return replace(base, factors=(Factor(size=0, reduction="add"),), flops=0.0, once=True, localized=True)


def makes_the_same(node: Node) -> bool:
    """Whether a node without bodies always has equal results for equal operands, so that it may run once for all.

    What stands behind a barrier is to be made anew; what users add may do anything.
    """
    return node.primitive in known_primitives() - CALLBACKS - {"optimization_barrier", "shard_map"}
