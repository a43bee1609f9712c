"""Marks in the scopes of a program's nodes, by which they are found again in a new trace of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from autopar.frontend import Body, Equation, Traced
from autopar.lowering import body_of
from passes.ir import Graph, Node

_MARK = re.compile(r".*@(\d+)", re.DOTALL)
"""The pattern of the last mark in a scope."""


def marked_once(traced: Traced) -> tuple[Body, list[Node]]:
    """(the body of a program with marks, the nodes that they are of), cached on its graph for all numbers of
    microbatches.
    """
    memo, origins = traced.graph.memo, list[Node]()
    known = cast("tuple[object, Body, list[Node]] | None", memo.get(marked_once))
    if known is None or known[0] is not traced.equations:
        memo[marked_once] = known = traced.equations, _marked(body_of(traced), origins), origins
    return known[1:]


def _marked(body: Body, origins: list[Node]) -> Body:
    """The body with a number in every node's scope, by which it is found again in a new trace."""
    nodes: list[Node] = []
    equations: list[Equation] = []
    for node, equation in zip(body.graph.nodes, body.equations, strict=True):
        mark = f"@{len(origins)}"
        origins.append(node)
        bodies = tuple(_marked(inner, origins) for inner in equation.bodies)
        equations.append(replace(equation, bodies=bodies) if bodies else equation)
        graphs = tuple(inner.graph for inner in bodies) if bodies else node.subgraphs
        nodes.append(replace(node, scope=mark, subgraphs=graphs))
    return Body(graph=replace(body.graph, nodes=tuple(nodes)), equations=tuple(equations), constants=body.constants)


def restored(graph: Graph, origins: Sequence[Node]) -> Graph:
    """The graph with the scopes and source lines of the nodes that its own come from."""

    def restore(node: Node) -> Node:
        bodies = tuple(restored(inner, origins) for inner in node.subgraphs)
        mark = _MARK.search(node.scope)
        if mark is None:
            return replace(node, subgraphs=bodies) if bodies else node
        origin = origins[int(mark[1])]
        return Node(
            primitive=node.primitive,
            inputs=node.inputs,
            outputs=node.outputs,
            params=node.params,
            subgraphs=bodies,
            source=origin.source,
            scope=origin.scope,
        )

    return replace(graph, nodes=tuple(map(restore, graph.nodes)))
