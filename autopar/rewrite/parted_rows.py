"""Loops over chunks of the rows of a batch, in parts: each microbatch runs those iterations that have its rows.

Logits of all tokens in a row, [rows * time, ...], are computed in chunks of these. Such a loop takes the batch apart
along its rows. Where iterations are independent, and the number of microbatches divides theirs, it is as many loops
side by side, each over the consecutive chunks of one microbatch; in a microbatch it is one of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax

from autopar import jax_compat
from autopar.frontend import Equation, Traced, flatten, side_by_side
from autopar.rewrite.marks import matching
from passes.ir import Graph, Node, TensorType, has_effect
from passes.layers import DimClasses, batch_inputs
from passes.transforms import loops_over_rows


def with_rows_parted(traced: Traced, count: int) -> Traced | None:
    """The same step with its loops over rows of the batch in `count` parts side by side; None if none can be."""
    batch = batch_inputs(traced.graph, traced.state_pairs, traced.named)
    written = traced
    while parted := _parted(written, loops_over_rows(written.graph, count, batch), count):
        written = parted
    return None if written is traced else written


def _parted(traced: Traced, loops: Collection[int], count: int) -> Traced | None:
    """The same step with those of these nodes in parts that can be; None if none can."""
    writer = Writer(traced)
    for index, (node, equation) in enumerate(zip(traced.graph.nodes, traced.equations, strict=True)):
        jaxpr = _side_by_side(traced.graph, node, equation, count) if index in loops else None
        if jaxpr is None:
            writer.add(node, equation)
        else:
            writer.add_in_place_of(node, jaxpr)
    return writer.finish() if len(writer.nodes) > len(traced.graph.nodes) else None


def _side_by_side(graph: Graph, node: Node, equation: Equation, count: int) -> Any:
    """The jaxpr of a loop in parts side by side; None where that changes its meaning."""
    unchanged, params = DimClasses.unchanged_carries(node), equation.params
    if unchanged is None or "jaxpr" not in params or params["length"] % count or has_effect(node):
        return None
    types = (graph.types[v] for v in node.inputs)
    operands = [SimpleNamespace(aval=jax.ShapeDtypeStruct(t.shape, jax_compat.dtype_of(t.dtype))) for t in types]
    return side_by_side(SimpleNamespace(params=params, effects=(), invars=operands), count, unchanged)


@dataclass
class Writer:
    """A program under construction, in which values keep their numbers; `same` are results that another value is."""

    traced: Traced
    types: list[TensorType] = field(init=False)
    nodes: list[Node] = field(default_factory=list[Node])
    equations: list[Equation] = field(default_factory=list[Equation])
    literals: dict[int, float | int | bool | str] = field(init=False)
    constants: dict[int, Any] = field(init=False)
    same: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        graph = self.traced.graph
        self.types, self.literals = list(graph.types), dict(graph.literals)
        self.constants = dict(zip(graph.constants, self.traced.constants, strict=True))

    def value(self, type: TensorType) -> int:
        """A new value."""
        self.types.append(type)
        return len(self.types) - 1

    def literal(self, number: float, type: TensorType) -> int:
        """The value of a number."""
        value = self.value(type)
        self.literals[value] = number
        return value

    def add(self, node: Node, equation: Equation) -> None:
        """Adds a node as it is."""
        self.nodes.append(replace(node, inputs=tuple(self.same.get(v, v) for v in node.inputs)))
        self.equations.append(equation)

    def add_in_place_of(self, node: Node, jaxpr: Any) -> None:
        """Adds what a jaxpr computes, in place of a node with the same operands and results."""
        body = flatten(jaxpr)
        graph = body.graph
        number = dict(zip(graph.inputs, (self.same.get(v, v) for v in node.inputs), strict=True))
        for value, result in zip(graph.outputs, node.outputs, strict=True):
            if number.setdefault(value, result) != result:
                self.same[result] = number[value]
        for value, type in enumerate(graph.types):
            if value not in number:
                number[value] = self.value(type)
        self.literals |= {number[v]: literal for v, literal in graph.literals.items()}
        self.constants |= {number[v]: array for v, array in zip(graph.constants, body.constants, strict=True)}
        for made, equation in zip(graph.nodes, body.equations, strict=True):
            inputs, outputs = (tuple(number[v] for v in values) for values in (made.inputs, made.outputs))
            inside = replace(_inside(node, made), inputs=inputs, outputs=outputs)
            self.nodes.append(inside)
            self.equations.append(matching(equation, inside))

    def finish(self) -> Traced:
        """The program."""
        graph = self.traced.graph
        written = replace(
            graph,
            types=tuple(self.types),
            nodes=tuple(self.nodes),
            outputs=tuple(self.same.get(v, v) for v in graph.outputs),
            literals=self.literals,
            constants=tuple(self.constants),
        )
        written.verify()
        constants = tuple(self.constants.values())
        return replace(self.traced, graph=written, equations=tuple(self.equations), constants=constants)


def _inside(call: Node, node: Node) -> Node:
    """A node in the scope of another, at its source line if it has none."""
    scope = "/".join(filter(None, (call.scope, node.scope)))
    subgraphs = tuple(replace(g, nodes=tuple(_inside(call, n) for n in g.nodes)) for g in node.subgraphs)
    return replace(node, scope=scope, source=node.source or call.source, subgraphs=subgraphs)
