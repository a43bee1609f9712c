"""The registry of sharding rules, one for each primitive, and how a rule is built of labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import cast

from passes.errors import PlanningError
from passes.ir import Graph, Node, TensorType
from passes.rules.sharding_rule import Factor, Factors, ShardingRule, Types
from passes.rules.unruled import WITHOUT_RULE

RuleFunction = Callable[[Node, Types, Types], ShardingRule]

_RULES: dict[str, RuleFunction] = {}
_FREE: set[str] = set()
_USER_RULES: dict[str, RuleFunction] = {}
_KNOWN: dict[tuple[str, int, Types, Types], tuple[Mapping[str, object], ShardingRule]] = {}
"""Rules by content, with the parameters that they were made from: an id stands for those as long as they are held."""

MOST_KNOWN = 1 << 14
"""The rules that are remembered before all are forgotten."""


def rule(*primitives: str, free: bool = False) -> Callable[[RuleFunction], RuleFunction]:
    """The decorator that registers a rule for primitives, by name. Raises PlanningError for a primitive that has one.

    A `free` primitive costs nothing where its operands are literals: it is made in whatever placement its readers need.
    """

    def register(function: RuleFunction) -> RuleFunction:
        if free:
            _FREE.update(primitives)
        for primitive in primitives:
            if primitive in _RULES:
                raise PlanningError(f"primitive {primitive!r} already has a sharding rule")
            _RULES[primitive] = function
        return function

    return register


def define(primitive: str, function: RuleFunction) -> None:
    """Adds a user's rule, or replaces one; rules of our own come first."""
    _USER_RULES[primitive] = function
    _KNOWN.clear()


def made_anywhere(node: Node) -> bool:
    """Whether a node of literals alone is made in whatever placement its readers need, at no cost."""
    return node.primitive in _FREE


def known_primitives() -> frozenset[str]:
    """The primitives that have a rule of our own."""
    return frozenset(_RULES)


def rule_of(node: Node, graph: Graph) -> ShardingRule:
    """The sharding rule of one node; a primitive without a rule is replicated, with the reason.

    Nodes of equal layers share their parameters, and so their rule.
    """
    operands = tuple([graph.types[value] for value in node.inputs])
    results = tuple([graph.types[value] for value in node.outputs])
    key = (node.primitive, id(node.params), operands, results)
    cached = _KNOWN.get(key)
    if cached is not None and cached[0] is node.params and not node.subgraphs:
        return cached[1]
    rule = _made(node, operands, results)
    if len(_KNOWN) >= MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[key] = node.params, rule
    return rule


def rules_of(graph: Graph) -> tuple[ShardingRule, ...]:
    """The rules of all nodes of a graph, one object for equal nodes; the same tuple until a user adds a rule."""
    added = tuple(_USER_RULES.values())
    known = cast("tuple[tuple[RuleFunction, ...], tuple[ShardingRule, ...]]", graph.memo.get(rules_of, ((), ())))
    if known[0] != added or len(known[1]) != len(graph.nodes):
        graph.memo[rules_of] = known = added, tuple(_each_once(graph))
    return known[1]


def _each_once(graph: Graph) -> Iterator[ShardingRule]:
    """The rule of each node; equal nodes mostly hold the same objects, and those need no comparing."""
    types, ids = graph.types, list(map(id, graph.types))
    known: dict[object, ShardingRule] = {}
    for node in graph.nodes:
        same = (node.primitive, id(node.params), *[ids[v] for v in node.inputs], None, *[ids[v] for v in node.outputs])
        rule = None if node.subgraphs else known.get(same)
        if rule is None:
            reads, writes = (tuple([types[v] for v in values]) for values in (node.inputs, node.outputs))
            equal = (node.primitive, repr(node.params), reads, writes)
            if node.subgraphs or equal not in known:
                known[equal] = rule_of(node, graph)
            rule = known[same] = known[equal]
        yield rule


def _made(node: Node, operands: Types, results: Types) -> ShardingRule:
    function = _RULES.get(node.primitive) or _USER_RULES.get(node.primitive)
    if function is None:
        reason = WITHOUT_RULE.get(node.primitive, f"no sharding rule for {node.primitive!r}")
        return replicate(operands, results, reason)
    return function(node, operands, results)


def replicate(operands: Types, results: Types, reason: str) -> ShardingRule:
    """The rule of an operation that every device computes whole."""
    return ShardingRule(
        factors=(),
        operands=tuple((-1,) * t.rank for t in operands),
        results=tuple((-1,) * t.rank for t in results),
        flops=float(sum(t.size for t in results)),
        light=False,
        reason=reason,
    )


def build(
    operands: Sequence[tuple[TensorType, Sequence[Hashable]]],
    results: Sequence[tuple[TensorType, Sequence[Hashable]]],
    *,
    reduce: Mapping[Hashable, str] | None = None,
    partial: Mapping[Hashable, tuple[int, ...]] | None = None,
    sizes: Mapping[Hashable, int] | None = None,
    linear: Sequence[tuple[int, ...]] = (),
    flops: float | None = None,
    light: bool = True,
    sparse: tuple[int, ...] = (),
) -> ShardingRule:
    """The rule that labels describe: dimensions with equal labels are one factor; those labelled None are never cut.

    `reduce` names the reduction of labels that the results lack, `partial` the operands that must come in partial over
    a label, `sizes` a label's size where its dimension is larger. Each set of `linear` operands may come in partial
    together and leave the result partial.
    """
    reduce, partial, sizes = reduce or {}, partial or {}, sizes or {}
    numbers: tuple[dict[Hashable, int], dict[Hashable, int]] = {}, {}  # those of dimensions of one element are apart
    factors: tuple[list[Factor], list[Factor]] = [], []
    # JAX cannot place an array without elements in pieces.
    never = {label for type, labels in (*operands, *results) if not type.size for label in labels} | {None}
    for type, labels in (*operands, *results):
        for size, label in zip(type.shape, labels, strict=True):
            known, made = numbers[size == 1], factors[size == 1]
            if label not in never and label not in known:
                known[label] = len(made)
                made.append(
                    Factor(
                        size=1 if size == 1 else sizes.get(label, size),
                        reduction=reduce.get(label, ""),
                        partial=partial.get(label, ()),
                    )
                )

    def dims(side: Sequence[tuple[TensorType, Sequence[Hashable]]], single: bool) -> Factors:
        labelled = [zip(type.shape, labels, strict=True) for type, labels in side]
        known = numbers[single]
        return tuple(tuple(known.get(b, -1) if single == (size == 1) else -1 for size, b in each) for each in labelled)

    if not any(type.dtype == "float0" for type, _ in (*operands, *results)):  # of which there are no sums
        factors[0].extend(Factor(size=0, reduction="add", partial=tuple(together)) for together in linear)
    single = ShardingRule(factors=tuple(factors[1]), operands=dims(operands, True), results=dims(results, True))
    return ShardingRule(
        factors=tuple(factors[0]),
        operands=dims(operands, False),
        results=dims(results, False),
        flops=float(sum(t.size for t, _ in results)) if flops is None else flops,
        light=light,
        sparse=sparse,
        single=single if single.factors else None,
    )


def moved(*dims: int, operands: int = 1) -> tuple[tuple[int, int, int], ...]:
    """The moves of the first operands along dimensions that the results have in the same place."""
    return tuple([(operand, dim, dim) for operand in range(operands) for dim in dims])


def size_of(shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    return math.prod(shape)
