"""Batches behind time, [time, rows, ...], as batches of rows first: what microbatches are cut from.

Where loops run over the first dimension of what a step takes, in order, or its positions attend to each other,
microbatches are parts of the second, as devices' parts are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.frontend import Traced, Writer, flatten
from autopar.lowering import body_of
from passes.ir import TensorType
from passes.layers import batch_inputs, row_dims


def rows_by_input(traced: Traced) -> dict[int, int]:
    """The dimension of each input of the batch along which it has rows, by position; empty where that is everyone's
    first.
    """
    graph = traced.graph
    batch = batch_inputs(graph, traced.state_pairs, traced.named)
    state = {i for _, i in traced.state_pairs}
    others = tuple(i for i in range(len(graph.inputs)) if i not in state and i not in batch)
    return row_dims(graph, batch, others)


def with_rows_first(traced: Traced) -> tuple[Traced, tuple[int, ...]] | None:
    """(the same step of inputs whose first two dimensions are exchanged where time is before rows, the positions of
    these inputs); None if there are none.
    """
    dims, graph = rows_by_input(traced), traced.graph
    behind = tuple(sorted(i for i, dim in dims.items() if dim == 1 and graph.consumers.get(graph.inputs[i])))
    if not behind:
        return None
    writer, inputs = Writer(body_of(traced)), list(graph.inputs)
    for position in behind:
        value = graph.inputs[position]
        swapped = _swapped(graph.types[value])
        inputs[position] = writer.fresh(swapped)
        like = graph.nodes[min(graph.consumers[value])]
        struct = jax.ShapeDtypeStruct(swapped.shape, jax_compat.dtype_of(swapped.dtype))
        with jax_compat.no_mesh():
            exchange = flatten(jax.make_jaxpr(lambda x: jnp.swapaxes(x, 0, 1))(struct))
        writer.add_in_place_of(like, exchange, (inputs[position],), (value,))
    for node, equation in zip(graph.nodes, traced.equations, strict=True):
        writer.add(node, equation)
    writer.graph = replace(graph, inputs=tuple(inputs), pinned=_without(graph.pinned, behind))
    body = writer.finish(graph.outputs)
    named = tuple(position in dims for position in range(len(inputs)))
    pairs = tuple(pair for pair in traced.state_pairs if pair[1] not in behind)
    written = replace(
        traced,
        graph=body.graph,
        equations=body.equations,
        constants=body.constants,
        named=named,
        state_pairs=pairs,
    )
    return written, behind


def stacked_rows(array: jax.Array, count: int) -> jax.Array:
    """An array [time, rows, ...] as microbatches of its rows, [count, rows / count, time, ...]."""
    time, rows, *inner_shape = array.shape
    apart = jax.lax.reshape(array, (time, count, rows // count, *inner_shape))
    return jnp.moveaxis(apart, 0, 2)


def _swapped(type: TensorType) -> TensorType:
    """The type with its first two dimensions exchanged."""
    time, rows, *inner_shape = type.shape
    return replace(type, shape=(rows, time, *inner_shape))


def _without(pinned: Any, positions: Collection[int]) -> dict[int, Any]:
    return {i: placement for i, placement in pinned.items() if i not in positions}
