"""A graph with the equations of its nodes: all that is needed to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar import jax_compat
from passes.ir import Graph, Node


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
