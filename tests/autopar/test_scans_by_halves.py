"""Scans that work on halves, and halves of those: few dimensions of the many are offered to the axes of a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from passes.intra_op.group_signatures import MOST_CLASSES, signature_of
from passes.placement import group

LENGTH, WIDTH = 256, 64


def step(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        decays, inputs = jax.nn.sigmoid(x @ w), x
        kept = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decays, inputs), axis=1)[1]
        return jnp.mean(kept**2)

    return w - 0.1 * jax.grad(loss)(w)


def test_axes_choose_from_the_largest_dimensions() -> None:
    """There are some for each half, and the choices of two axes are their square: planning took most of a minute."""
    given = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((64, LENGTH, WIDTH), "float32")
    parallel = autopar.parallelize(step, cluster="8:a100-80g", planner=autopar.DataParallel())
    plan, graph = parallel.plan(*given), parallel.trace(*given).graph
    grouping = group(graph)
    shapes = [
        signature_of(g, graph, grouping, frozenset(), [0] * len(graph.nodes))[0] for g in grouping.operator_groups
    ]
    assert max(len(g.classes) for g in grouping.operator_groups) > 2 * MOST_CLASSES
    assert max(len(shape.options) for shape in shapes) == MOST_CLASSES
    assert [collective.kind for collective in plan.collectives] == ["all_reduce"]  # the batch is among them
