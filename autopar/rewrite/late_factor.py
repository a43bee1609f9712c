"""A number by which a backward pass multiplies all that it computes, though the whole batch decides it.

The derivative of a root of a mean, of its logarithm, or of losses divided by how many of them count, begins with such a
factor. Microbatches have it only when the last forward pass is done, but a backward pass is linear: begun with 1, it
makes gradients that are multiplied by the factor when they are summed up, which rounds them once more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import jax
from jax.extend.core import ClosedJaxpr

from autopar import jax_compat
from autopar.frontend import Traced, Writer, flatten
from autopar.lowering import body_of
from autopar.rewrite.counts_apart import made_of
from passes.ir import Graph, Node, TensorType, phase, scan_of
from passes.layers import batch_inputs
from passes.placement import is_free
from passes.rules import ShardingRule, rules_of

_NARROW = "float16"
"""A dtype in which gradients without their factor may be out of range; bfloat16 has that of float32."""


def with_late_factor(traced: Traced) -> Traced | None:
    """The same step with its backward pass's factor behind it; None if it has none that the whole batch decides."""
    graph = traced.graph
    batch = [graph.inputs[i] for i in batch_inputs(graph, traced.state_pairs, traced.named)]
    factor = _late_factor(graph, batch)
    if factor is None:
        return None
    writer, multiplied = Writer(body_of(traced)), dict[int, int]()
    unit = writer.literal(1.0, graph.types[factor.value])
    for index, (node, equation) in enumerate(zip(graph.nodes, traced.equations, strict=True)):
        if index not in factor.nodes:
            writer.add(replace(node, inputs=tuple(multiplied.get(v, v) for v in node.inputs)), equation)
            continue
        writer.add(replace(node, inputs=tuple(unit if v == factor.value else v for v in node.inputs)), equation)
        for value in set(factor.leaving).intersection(node.outputs):
            multiplied[value] = product = writer.fresh(graph.types[value])
            multiply = flatten(_product(graph.types[value], graph.types[factor.value]))
            writer.add_in_place_of(node, multiply, (value, factor.value), (product,))
    body = writer.finish([multiplied.get(v, v) for v in graph.outputs])
    return replace(traced, graph=body.graph, equations=body.equations, constants=body.constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LateFactor:
    """A number `value`, the `nodes` of which each is linear in it, and the values `leaving` them for other readers."""

    value: int
    nodes: frozenset[int]
    leaving: tuple[int, ...]


def _late_factor(graph: Graph, batch: Collection[int]) -> _LateFactor | None:
    """The factor with which the backward pass of a step begins, if the inputs `batch` and others decide it together.

    None where there is none, or more than one.
    """
    of_batch, of_others = made_of(graph, batch), made_of(graph, set(graph.inputs).difference(batch))
    factors = dict.fromkeys(
        value
        for node in graph.nodes
        if phase(node) == "backward" and any(graph.types[v].rank for v in node.outputs)
        for value in node.inputs
        if value in of_batch and value in of_others and not graph.types[value].rank and graph.types[value].is_float
    )
    if len(factors) != 1:
        return None
    (value,) = factors
    scaled, nodes = {value}, set[int]()
    for index, node in enumerate(graph.nodes):
        if scaled.isdisjoint(node.inputs) or phase(node) != "backward":
            continue
        if results := _scaled_results(graph, index, scaled):
            nodes.add(index)
            scaled.update(results)
    if any(graph.types[v].dtype == _NARROW for v in scaled):
        return None
    read = {v for i, node in enumerate(graph.nodes) if i not in nodes for v in node.inputs}.union(graph.outputs)
    return _LateFactor(value=value, nodes=frozenset(nodes), leaving=tuple(sorted(scaled & read - {value})))


def _scaled_results(graph: Graph, index: int, scaled: Collection[int]) -> list[int]:
    """The results of a node that are multiplied by a factor as some of its operands are; empty if not all results are
    either that or as they were.
    """
    node, rule = graph.nodes[index], rules_of(graph)[index]
    if node.subgraphs:
        return _scaled_by_loop(graph, node, scaled)
    if rule.alias:
        return [b for a, b in zip(node.inputs, node.outputs, strict=True) if a in scaled]
    return list(node.outputs) if _is_linear(graph, node, rule, scaled) else []


def _is_linear(graph: Graph, node: Node, rule: ShardingRule, scaled: Collection[int]) -> bool:
    """Whether an operator's results are linear in these operands: others that are added to them are zeros."""
    types = graph.types
    if rule.casts:
        return all(types[v].is_inexact for v in (*node.inputs, *node.outputs))
    within = {i for i, value in enumerate(node.inputs) if value in scaled}
    zeros = {i for i, value in enumerate(node.inputs) if _is_zero(graph, value)}
    linear = (set(f.partial) for f in rule.factors if not f.size and f.reduction == "add")
    return any(within <= operands <= within | zeros for operands in linear)


def _scaled_by_loop(graph: Graph, node: Node, scaled: Collection[int]) -> list[int]:
    """`_scaled_results` of a loop over slices, whose carries stay multiplied by the factor, or begin as zeros."""
    if (scan := scan_of(node)) is None:
        return []
    (body,) = node.subgraphs
    entering = {inner for value, inner in zip(node.inputs, body.inputs, strict=True) if value in scaled}
    places = slice(scan.constants, scan.fixed)
    carries = list(zip(node.inputs[places], body.inputs[places], body.outputs, strict=False))
    entering |= {begin for first, begin, _ in carries if body.types[begin].is_float and _is_zero(graph, first)}
    while True:
        inside = set(entering)
        for index, inner in enumerate(body.nodes):
            if inside.isdisjoint(inner.inputs):
                continue
            results = _scaled_results(body, index, inside)
            if not results:
                return []
            inside.update(results)
        unlike = [(first, begin) for first, begin, end in carries if (begin in inside) != (end in inside)]
        if not unlike:
            return [value for value, end in zip(node.outputs, body.outputs, strict=True) if end in inside]
        if any(begin not in entering or not _is_zero(graph, first) for first, begin in unlike):
            return []
        entering -= {begin for _, begin in unlike}


def _is_zero(graph: Graph, value: int) -> bool:
    """Whether a value is known to be zeros: a literal, or one that is broadcast."""
    if value in graph.literals:
        return graph.literals[value] == 0
    index = graph.producers.get(value)
    if index is None or not is_free(graph, index):
        return False
    inputs = graph.nodes[index].inputs
    return bool(inputs) and all(_is_zero(graph, v) for v in inputs)


def _product(array: TensorType, factor: TensorType) -> ClosedJaxpr:
    """The jaxpr of an array times a number, rounded to the array's dtype."""
    structs = (jax.ShapeDtypeStruct(t.shape, jax_compat.dtype_of(t.dtype)) for t in (array, factor))
    with jax_compat.no_mesh():
        return jax.make_jaxpr(lambda x, scale: (x * scale).astype(x.dtype))(*structs)
