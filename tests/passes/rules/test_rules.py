"""Every primitive of JAX has a sharding rule or a reason not to."""

from __future__ import annotations

import pickle

import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

from passes.ir import Graph, Node, TensorType
from passes.placement import group
from passes.rules import WITHOUT_RULE, build, define, known_primitives, registry, rule_of, rules_of

PUBLIC = {p.name for module in (primitives, lax) for p in vars(module).values() if isinstance(p, Primitive)}

ELSEWHERE = {"call", "closed_call", "dce_sink", "eval_jaxpr"}
"""Primitives that only some of JAX 0.10 to 0.12 export."""


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


def test_rules_kept_on_a_graph_follow_a_rule_that_is_added_and_are_not_pickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    type = TensorType(shape=(4,), dtype="float32")
    twice = (Node(primitive="mine", inputs=(0,), outputs=(1,)), Node(primitive="mine", inputs=(1,), outputs=(2,)))
    graph = Graph(types=(type,) * 3, nodes=twice, inputs=(0,), outputs=(2,))
    monkeypatch.setattr(registry, "_USER_RULES", {})
    before, grouping = rules_of(graph), group(graph)
    assert before[0] is before[1]
    assert before[0].reason
    assert rules_of(graph) is before
    assert group(graph) is grouping
    define("mine", lambda node, reads, writes: build([(reads[0], "i")], [(writes[0], "i")]))
    assert [rule.reason for rule in rules_of(graph)] == ["", ""]
    assert group(graph).rules == rules_of(graph)
    assert "memo" in vars(graph)
    assert "memo" not in vars(pickle.loads(pickle.dumps(graph)))


@pytest.mark.parametrize(
    ("before", "after", "is_exact"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "float64", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("int32", "float32", False),
    ],
)
def test_parts_of_sums_go_on_where_a_cast_keeps_every_number(before: str, after: str, is_exact: bool):
    types = (TensorType(shape=(8,), dtype=before), TensorType(shape=(8,), dtype=after))
    node = Node(primitive="convert_element_type", inputs=(0,), outputs=(1,), params={"new_dtype": after})
    graph = Graph(types=types, nodes=(node,), inputs=(0,), outputs=(1,))
    assert any(factor.partial for factor in rule_of(node, graph).factors) == is_exact


@pytest.mark.parametrize(
    ("dtype", "goes_on"), [("float32", True), ("bfloat16", True), ("complex64", True), ("bool", False)]
)
def test_parts_of_sums_go_on_where_some_are_selected(dtype: str, goes_on: bool):
    types = (TensorType(shape=(8,), dtype="bool"), *[TensorType(shape=(8,), dtype=dtype)] * 3)
    node = Node(primitive="select_n", inputs=(0, 1, 2), outputs=(3,))
    graph = Graph(types=types, nodes=(node,), inputs=(0, 1, 2), outputs=(3,))
    assert any(factor.partial for factor in rule_of(node, graph).factors) == goes_on
