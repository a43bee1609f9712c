"""A graph with the equations of its nodes: all that is needed to run it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar import jax_compat
from passes.ir import Graph, Node, TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """The equation of one node, bound as `primitive.bind(*inputs, **jax_compat.bind_params(equation, params))`.

    `params` are JAX's own, jaxprs and callables included. `bodies` belong to the node's `subgraphs`, one for one.
    """

    primitive: jax_compat.Primitive
    params: Mapping[str, Any] = field(default_factory=dict)
    bodies: tuple[Body, ...] = ()

    def matching(self, node: Node) -> Equation:
        """The equation with the bodies of its node, which are its own but for scopes, source lines and numbers."""
        if not self.bodies:
            return self
        return replace(self, bodies=tuple(b.matching(g) for b, g in zip(self.bodies, node.subgraphs, strict=False)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A graph with all that is needed to run it: `equations[i]` is node i's, `constants[i]` the array of constant i."""

    graph: Graph
    equations: tuple[Equation, ...]
    constants: tuple[Any, ...]

    def matching(self, graph: Graph) -> Body:
        """The body with a graph that is its own but for scopes, source lines and numbers."""
        equations = tuple(equation.matching(node) for equation, node in zip(self.equations, graph.nodes, strict=True))
        return Body(graph=graph, equations=equations, constants=self.constants)


def live_body(
    types: Sequence[TensorType],
    steps: Sequence[tuple[Node, Equation]],
    kept: Collection[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    literals: Mapping[int, float | int | bool | str],
    constants: Mapping[int, Any],
) -> Body:
    """The body of nodes with their equations, without dead ones, its values numbered in order of appearance.

    Some are `kept`, by their number; inputs and outputs have no names.
    """
    live = set(outputs)
    picked: list[tuple[Node, Equation]] = []
    for index in reversed(range(len(steps))):
        node, _ = steps[index]
        if index in kept or not live.isdisjoint(node.outputs):
            live.update(node.inputs)
            picked.append(steps[index])
    picked.reverse()
    read_constants, read_literals = ([v for v in known if v in live] for known in (constants, literals))
    order = [*inputs, *read_constants, *read_literals, *(v for node, _ in picked for v in node.outputs)]
    number = {value: index for index, value in enumerate(order)}

    def renumber(values: Sequence[int]) -> tuple[int, ...]:
        return tuple([number[v] for v in values])

    graph = Graph(
        types=tuple(types[v] for v in order),
        nodes=tuple(replace(node, inputs=renumber(node.inputs), outputs=renumber(node.outputs)) for node, _ in picked),
        inputs=renumber(inputs),
        outputs=renumber(outputs),
        constants=renumber(read_constants),
        literals={number[v]: literals[v] for v in read_literals},
    )
    graph.verify()
    return Body(
        graph=graph,
        equations=tuple(equation for _, equation in picked),
        constants=tuple(constants[v] for v in read_constants),
    )
