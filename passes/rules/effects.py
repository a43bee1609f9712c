"""Rules of callbacks: each runs once, on one device, on whole operands, as in a program of one device.

The device hands out what a callback returns as a sum to which the others add nothing.
"""

from __future__ import annotations

from dataclasses import replace

from passes.ir import Node
from passes.rules.registry import Factor, ShardingRule, Types, known_primitives, replicate, rule

EFFECTFUL = frozenset({"io_callback", "debug_callback", "debug_print"})
"""Primitives that do something besides computing, once wherever they stand."""

CALLBACKS = EFFECTFUL | {"pure_callback"}
"""Primitives that call the host's own code."""


@rule(*sorted(CALLBACKS))
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    whole = replicate(operands, results, "a callback runs once, on whole operands")
    return replace(whole, factors=(Factor(size=0, reduction="add"),), flops=0.0, once=True)


def has_effect(node: Node) -> bool:
    """Whether a node, or one in its bodies, does something besides computing."""
    return node.primitive in EFFECTFUL or any(has_effect(inner) for body in node.subgraphs for inner in body.nodes)


def makes_the_same(node: Node) -> bool:
    """Whether a node without bodies makes the same of the same operands whenever it runs, and may run once for all.

    What stands behind a barrier is to be made anew; what users add may do anything.
    """
    return node.primitive in known_primitives() - CALLBACKS - {"optimization_barrier", "shard_map"}


def is_ordered(node: Node) -> bool:
    """Whether a node, or one in its bodies, does so in program order."""
    if node.primitive in EFFECTFUL:
        return bool(node.params.get("ordered")) or node.params.get("effect") == "OrderedDebug"
    return any(is_ordered(inner) for body in node.subgraphs for inner in body.nodes)
