"""Loops over chunks of the rows of a batch, in parts: each microbatch runs those iterations that have its rows.

Logits of all tokens in a row, [rows * time, ...], are computed in chunks of these. Such a loop takes the batch apart
along its rows. Where iterations are independent, and the number of microbatches divides theirs, it is as many loops
side by side, each over the consecutive chunks of one microbatch; in a microbatch it is one of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax

from autopar import jax_compat
from autopar.frontend import Equation, Traced, Writer, flatten, side_by_side
from autopar.lowering import body_of
from passes.ir import Graph, Node, has_effect
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
    writer = Writer(body_of(traced))
    for index, (node, equation) in enumerate(zip(traced.graph.nodes, traced.equations, strict=True)):
        jaxpr = _side_by_side(traced.graph, node, equation, count) if index in loops else None
        if jaxpr is None:
            writer.add(node, equation)
        else:
            writer.add_in_place_of(node, flatten(jaxpr), node.inputs, node.outputs)
    if len(writer.nodes) == len(traced.graph.nodes):
        return None
    body = writer.finish(traced.graph.outputs)
    return replace(traced, graph=body.graph, equations=body.equations, constants=body.constants)


def _side_by_side(graph: Graph, node: Node, equation: Equation, count: int) -> Any:
    """The jaxpr of a loop in parts side by side; None where that changes its meaning."""
    unchanged, params = DimClasses.unchanged_carries(node), equation.params
    if unchanged is None or "jaxpr" not in params or params["length"] % count or has_effect(node):
        return None
    types = (graph.types[v] for v in node.inputs)
    operands = [SimpleNamespace(aval=jax.ShapeDtypeStruct(t.shape, jax_compat.dtype_of(t.dtype))) for t in types]
    return side_by_side(SimpleNamespace(params=params, effects=(), invars=operands), count, unchanged)
