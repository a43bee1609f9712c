"""The summands of a cotangent that several stages have, and what is made of their sum, as each stage makes it itself.

A weight that is read in several places has a cotangent in each, which the backward pass adds up. What it goes on to
make of the sum is linear where the forward pass made the same of the weight for all readers: it rounded it, or looked
up a bias by distances. Every stage then makes that of its own summands, as L(a + b) = L(a) + L(b), and no sum is handed
on from stage to stage in each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.ir import Graph, Node
from passes.placement import is_free
from passes.rules import rule_of


@dataclass(frozen=True, slots=True)
class Made:
    """A linear operator of a loop's body (`node`), whose operand number `operand` is a sum."""

    node: int
    operand: int


@dataclass(frozen=True, slots=True)
class Summand:
    """A value, and the operators, in order, that make of it what is added up."""

    value: int
    then: tuple[Made, ...] = ()


@dataclass(frozen=True, slots=True)
class Summands:
    """The summands of a value, and the nodes that are no longer computed where each stage adds up its own."""

    summands: tuple[Summand, ...]
    replaced: frozenset[int] = frozenset()


def summands_of(body: Graph, stages: Mapping[int, int], value: int, reader: int) -> Summands:
    """The summands of a value that `reader` alone reads, as far as their `stages` differ; else the value itself."""
    producer = body.producers.get(value)
    if producer is None or body.consumers[value] != (reader,):
        return Summands((Summand(value),))
    node = body.nodes[producer]
    operands = summed(body, node, stages)
    if not operands:
        return Summands((Summand(value),))
    parts = [summands_of(body, stages, node.inputs[operand], producer) for operand in operands]
    summands = tuple(summand for part in parts for summand in part.summands)
    if len({stages.get(summand.value, 0) for summand in summands}) == 1:
        return Summands((Summand(value),))
    if not rule_of(node, body).accumulates:
        (operand,) = operands
        summands = tuple(Summand(s.value, (*s.then, Made(producer, operand))) for s in summands)
    return Summands(summands, frozenset({producer}).union(*(part.replaced for part in parts)))


def summed(body: Graph, node: Node, stages: Mapping[int, int]) -> tuple[int, ...]:
    """The positions of the operands of a sum of cotangents, or the one of an operator that is linear in it; empty for
    others.

    Only that one is of a stage: operands that every stage has are factors or indices, and arrays that it is added to
    are zeros.
    """
    rule = rule_of(node, body)
    if rule.accumulates:
        return tuple(range(len(node.inputs)))
    staged = [i for i, v in enumerate(node.inputs) if v in stages]
    if len(staged) != 1 or len(node.outputs) != 1 or node.subgraphs or rule.multiplies or rule.convolves:
        return ()
    (operand,) = staged
    is_linear = any(
        not factor.size
        and operand in factor.partial
        and all(i == operand or _is_zero(body, node.inputs[i]) for i in factor.partial)
        for factor in rule.factors
    )
    return (operand,) if is_linear else ()


def _is_zero(body: Graph, value: int) -> bool:
    """Whether a value is zeros."""
    producer = body.producers.get(value)
    if producer is None:
        return value in body.literals and body.literals[value] == 0
    return is_free(body, producer) and all(body.literals[v] == 0 for v in body.nodes[producer].inputs)
