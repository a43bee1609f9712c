"""Traced functions of arrays by shape, and the run of a graph node by node, for tests of tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.frontend import Body, Traced, trace
from passes.ir import Graph, Node

ROOT = Path(__file__).parents[3]

F32 = jnp.float32


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(fun: Any, *args: Any, **options: Any) -> Traced:
    return trace(fun, args, {}, **options)


def primitives(graph: Graph) -> list[str]:
    return [node.primitive for node in graph.nodes]


def only(graph: Graph, primitive: str) -> Node:
    (node,) = (node for node in graph.nodes if node.primitive == primitive)
    return node


def run(body: Traced | Body, *inputs: Any) -> list[Any]:
    """The graph executed node by node on whole arrays, as a lowering would on one device."""
    graph = body.graph
    values = dict(zip(graph.inputs, inputs, strict=True)) | dict(zip(graph.constants, body.constants, strict=True))
    for value, number in graph.literals.items():
        values[value] = jnp.asarray(number, dtype=graph.types[value].dtype)
    for node, equation in zip(graph.nodes, body.equations, strict=True):
        params = jax_compat.bind_params(equation, dict(equation.params))
        results = equation.primitive.bind(*(values[v] for v in node.inputs), **params)
        results = results if equation.primitive.multiple_results else [results]
        values.update(zip(node.outputs, results, strict=True))
    return [values[v] for v in graph.outputs]
