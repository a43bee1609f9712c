"""Primitives that do something besides computing: callbacks into the host's code, some of them in program order."""

from __future__ import annotations

from passes.ir.graph import Node

EFFECTFUL = frozenset({"io_callback", "debug_callback", "debug_print"})
"""Primitives that do something besides computing, once wherever they stand."""

CALLBACKS = EFFECTFUL | {"pure_callback"}
"""Primitives that call the host's own code."""


def has_effect(node: Node) -> bool:
    """Whether a node, or one in its bodies, does something besides computing."""
    return node.primitive in EFFECTFUL or any(has_effect(inner) for body in node.subgraphs for inner in body.nodes)


def is_ordered(node: Node) -> bool:
    """Whether a node, or one in its bodies, has an effect that must happen in program order."""
    if node.primitive in EFFECTFUL:
        return bool(node.params.get("ordered")) or node.params.get("effect") == "OrderedDebug"
    return any(is_ordered(inner) for body in node.subgraphs for inner in body.nodes)
