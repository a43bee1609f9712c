"""A program written anew: its values keep their numbers, and new ones are added after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar import jax_compat
from autopar.frontend.bodies import Body, Equation
from autopar.frontend.primitives import plain_params
from passes.ir import Node, TensorType


class Writer:
    """A program under construction, with the inputs, literals and constants of an earlier one.

    `types`, `nodes` and `equations` are those so far. What was written for a value may turn out to be another value;
    it is read in its place.
    """

    def __init__(self, body: Body) -> None:
        graph = body.graph
        self.graph = graph
        self.types: list[TensorType] = list(graph.types)
        self.nodes: list[Node] = []
        self.equations: list[Equation] = []
        self._literals = dict(graph.literals)
        self._constants: dict[int, Any] = dict(zip(graph.constants, body.constants, strict=True))
        self._same: dict[int, int] = {}

    def fresh(self, type: TensorType) -> int:
        """The number of a new value."""
        self.types.append(type)
        return len(self.types) - 1

    def literal(self, number: float, type: TensorType) -> int:
        """The value of a number."""
        value = self.fresh(type)
        self._literals[value] = number
        return value

    def add(self, node: Node, equation: Equation) -> None:
        """Adds a node."""
        self.nodes.append(replace(node, inputs=self._read(node.inputs)))
        self.equations.append(equation)

    def add_operation(
        self,
        primitive: jax_compat.Primitive,
        params: Mapping[str, Any],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        like: Node | None,
    ) -> None:
        """Adds a node of this primitive, in the scope and at the source line of another."""
        node = Node(
            primitive=primitive.name,
            inputs=inputs,
            outputs=outputs,
            params=plain_params(params),
            source=like.source if like else "",
            scope=like.scope if like else "",
        )
        self.add(node, Equation(primitive=primitive, params=params))

    def add_in_place_of(self, node: Node, body: Body, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Adds a body that computes `outputs` of `inputs`, in the scope of the node that it replaces."""
        graph = body.graph
        number = dict(zip(graph.inputs, self._read(inputs), strict=True))
        for value, result in zip(graph.outputs, outputs, strict=True):
            if number.setdefault(value, result) != result:
                self._same[result] = number[value]
        for value, type in enumerate(graph.types):
            if value not in number:
                number[value] = self.fresh(type)
        self._literals |= {number[v]: literal for v, literal in graph.literals.items()}
        self._constants |= {number[v]: array for v, array in zip(graph.constants, body.constants, strict=True)}
        for made, equation in zip(graph.nodes, body.equations, strict=True):
            reads, writes = (tuple(number[v] for v in values) for values in (made.inputs, made.outputs))
            inside = replace(_inside(node, made), inputs=reads, outputs=writes)
            self.nodes.append(inside)
            self.equations.append(equation.matching(inside))

    def finish(self, outputs: Sequence[int]) -> Body:
        """The program with these outputs."""
        graph = replace(
            self.graph,
            types=tuple(self.types),
            nodes=tuple(self.nodes),
            outputs=self._read(outputs),
            literals=self._literals,
            constants=tuple(self._constants),
        )
        graph.verify()
        return Body(graph=graph, equations=tuple(self.equations), constants=tuple(self._constants.values()))

    def _read(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._same.get(value, value) for value in values)


def _inside(call: Node, node: Node) -> Node:
    """A node in the scope of another, at its source line if it has none."""
    scope = "/".join(filter(None, (call.scope, node.scope)))
    subgraphs = tuple(replace(g, nodes=tuple(_inside(call, n) for n in g.nodes)) for g in node.subgraphs)
    return replace(node, scope=scope, source=node.source or call.source, subgraphs=subgraphs)
