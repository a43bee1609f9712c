"""The nodes of a step by phase: forward nodes, between which it is cut, later ones, and those that every stage
computes.
"""

from __future__ import annotations

import re

from passes.ir import LOOP, Graph, Node, phase
from passes.placement import is_free
from passes.rules import made_anywhere, remembered, rules_of

_TRANSPOSED = re.compile(r"transpose\((jvp\([^()]*\))\)")


def forward_scope(scope: str) -> str:
    """The name stack of the forward operator whose gradient, or recomputation, an operator with this scope is."""
    return _TRANSPOSED.sub(r"\1", scope.removesuffix(f"/{Node.RECOMPUTED}"))


@remembered
def forward_nodes(body: Graph) -> tuple[int, ...]:
    """The nodes of the forward pass in order; layers and stages are cut between them."""
    late, anywhere = after_backward(body), everywhere(body)
    return tuple(i for i, n in enumerate(body.nodes) if i not in late and i not in anywhere and not adds_up(n))


def after_backward(body: Graph) -> set[int]:
    """The nodes of the backward pass, and all that depend on them."""
    late: set[int] = set()
    values: set[int] = set()
    for index, node in enumerate(body.nodes):
        if phase(node) == "backward" or not values.isdisjoint(node.inputs):
            late.add(index)
            values.update(node.outputs)
    return late


def adds_up(node: Node) -> bool:
    """Whether a node adds a microbatch's gradient to the sum of those before."""
    return node.scope.endswith("accumulate")


@remembered
def everywhere(body: Graph) -> frozenset[int]:
    """The nodes that every stage computes for itself: microbatch indices, broadcasts of values that all stages have,
    and reordered inputs.

    The result of a broadcast, such as a mask, is larger than its operand, and would otherwise be sent to every stage,
    as would a transposed weight to the stage that reads it.
    """
    copied: set[int] = set()
    for index, (node, rule) in enumerate(zip(body.nodes, rules_of(body), strict=True)):
        producers = (body.producers[v] for v in node.inputs if v in body.producers)
        is_glue = node.scope.startswith(LOOP) and not adds_up(node)
        is_copied = is_glue or made_anywhere(node) or rule.permutes
        if is_free(body, index) or (is_copied and all(m in copied for m in producers)):
            copied.add(index)
    return frozenset(copied)
