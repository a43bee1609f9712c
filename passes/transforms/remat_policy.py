"""The policies of what a layer keeps for its backward pass, and whether one includes a node."""

from __future__ import annotations

import re
from typing import Literal, get_args

from passes.ir import Graph, Node, has_effect
from passes.placement import is_free
from passes.rules import rule_of

Kept = Literal["everything", "matmuls", "inputs"]
"""The values that a layer keeps for its backward pass."""

KEPT: tuple[Kept, ...] = get_args(Kept)

_DIFFERENTIATED = re.compile(r"jvp\([^()]*\)")


def is_kept(graph: Graph, index: int, kept: Kept) -> bool:
    """Whether a node is never recomputed: it has an effect or costs nothing or, with `matmuls`, is a loop or a product.

    Those are the products of dense layers and convolutions, which share no dimension with their result.
    """
    node = graph.nodes[index]
    if kept == "everything" or has_effect(node) or is_free(graph, index):
        return True
    rule = rule_of(node, graph)
    return rule.once or (kept == "matmuls" and (bool(node.subgraphs) or (rule.is_product and not rule.is_batched)))


def transposed(scope: str) -> str:
    """The name stack of a forward operator that the backward pass recomputes, by which its stage is found.

    It is named as `jax.checkpoint` names its own, which shows that it computes nothing new.
    """
    return f"{_DIFFERENTIATED.sub(lambda match: f'transpose({match[0]})', scope, count=1)}/{Node.RECOMPUTED}"
