"""What a layer may keep for its backward pass, and what that says of a node."""

from __future__ import annotations

import re
from typing import Literal, get_args

from passes.ir import CALLBACKS, Graph, has_effect
from passes.placement import is_free
from passes.rules import ShardingRule, rule_of

Kept = Literal["everything", "matmuls", "inputs"]
"""What a layer keeps for its backward pass."""

KEPT: tuple[Kept, ...] = get_args(Kept)

_DIFFERENTIATED = re.compile(r"jvp\([^()]*\)")


def is_kept(graph: Graph, index: int, kept: Kept) -> bool:
    """Whether a node is never run again: what has an effect or costs nothing; with `matmuls`, loops and products."""
    node = graph.nodes[index]
    if node.primitive in CALLBACKS or has_effect(node) or is_free(graph, index) or kept == "everything":
        return True
    return kept == "matmuls" and (bool(node.subgraphs) or _is_product(rule_of(node, graph)))


def _is_product(rule: ShardingRule) -> bool:
    """Whether two operands are multiplied and summed over what they share, as by a dense layer or a convolution."""
    if len(rule.operands) < 2:
        return False
    both = (set(rule.operands[0]) & set(rule.operands[1])) - {-1}
    summed = any(rule.factors[factor].reduction == "add" for factor in both)
    return summed and all(both.isdisjoint(result) for result in rule.results)


def transposed(scope: str) -> str:
    """The scope that the backward pass of a forward scope has, by which its stage is found."""
    found = _DIFFERENTIATED.sub(lambda match: f"transpose({match[0]})", scope, count=1)
    return found if found != scope else f"{scope}/rematted_computation"
