"""The forward pass of a step's body, between whose nodes layers and stages are cut, and what follows it."""

from __future__ import annotations

import re

from passes.ir import LOOP, Graph, Node, phase
from passes.placement import FREE, is_free

_TRANSPOSED = re.compile(r"transpose\((jvp\([^()]*\))\)")


def forward_scope(scope: str) -> str:
    """The scope of the operator that a transposed one belongs to."""
    return _TRANSPOSED.sub(r"\1", scope)


def forward_nodes(body: Graph) -> tuple[int, ...]:
    """The nodes between which stages may be cut, in order: those of the forward pass."""
    late, anywhere = after_backward(body), everywhere(body)
    return tuple(i for i, n in enumerate(body.nodes) if i not in late and i not in anywhere and not adds_up(n))


def after_backward(body: Graph) -> set[int]:
    """The nodes of the backward pass and those that need it."""
    late: set[int] = set()
    values: set[int] = set()
    for index, node in enumerate(body.nodes):
        if phase(node) == "backward" or not values.isdisjoint(node.inputs):
            late.add(index)
            values.update(node.outputs)
    return late


def adds_up(node: Node) -> bool:
    return node.scope.endswith("accumulate")


def everywhere(body: Graph) -> frozenset[int]:
    """The nodes that any stage makes for itself: what says which microbatch it is, and broadcasts of what all can have.

    What a broadcast makes is larger than what it reads, and would otherwise be sent to every stage (a mask).
    """
    found: set[int] = set()
    for index, node in enumerate(body.nodes):
        made = (body.producers[v] for v in node.inputs if v in body.producers)
        is_glue = node.scope.startswith(LOOP) and not adds_up(node)
        if is_free(body, index) or ((is_glue or node.primitive in FREE) and all(m in found for m in made)):
            found.add(index)
    return frozenset(found)
