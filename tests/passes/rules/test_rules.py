"""Every primitive of JAX has a sharding rule or a reason not to."""

from __future__ import annotations

import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

from passes.ir import Graph, Node, TensorType
from passes.rules import WITHOUT_RULE, known_primitives, rule_of

PUBLIC = {p.name for module in (primitives, lax) for p in vars(module).values() if isinstance(p, Primitive)}

ELSEWHERE = {"dce_sink", "eval_jaxpr"}
"""Primitives that only one of JAX 0.10 and 0.11 exports."""


def test_every_primitive_has_a_rule_or_a_reason() -> None:
    assert PUBLIC - known_primitives() - WITHOUT_RULE.keys() == set()
    assert known_primitives() & WITHOUT_RULE.keys() == set()


def test_every_reason_is_of_a_primitive() -> None:
    assert WITHOUT_RULE.keys() - PUBLIC <= ELSEWHERE


@pytest.mark.parametrize(
    ("primitive", "reason"), [*WITHOUT_RULE.items(), ("unheard", "no sharding rule for 'unheard'")]
)
def test_a_primitive_without_a_rule_is_replicated_for_its_reason(primitive: str, reason: str) -> None:
    node = Node(primitive=primitive, inputs=(0,), outputs=(1,))
    graph = Graph(types=(TensorType(shape=(8,), dtype="float32"),) * 2, nodes=(node,), inputs=(0,), outputs=(1,))
    rule = rule_of(node, graph)
    assert (rule.factors, rule.operands, rule.results, rule.reason) == ((), ((-1,),), ((-1,),), reason)
