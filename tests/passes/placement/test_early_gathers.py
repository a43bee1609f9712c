"""Gathers for the backward pass that start at the product before, so that computing hides them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Plan
from passes.placement import Background, ReshardingPlan, resharding_plan
from passes.sharding import Resharder

WIDTH, LAYERS = 64, 3


def loss(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


def recomputing(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(weight, x)
    return jnp.sum(x**2)


def tied(weights: Any, x: jax.Array) -> jax.Array:
    """The first weight is read by the last layer, too."""
    return loss([*weights, weights[0].T], x)


def updated(loss: Any, weights: Any, x: jax.Array) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


step = partial(updated, loss)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / 8, "float32")


WEIGHTS, X = [drawn(WIDTH, WIDTH)] * LAYERS, drawn(16, WIDTH)


def reshardings(cluster: str) -> tuple[Any, ReshardingPlan]:
    """The graph of the step and its reshardings under ZeRO-3 on a cluster."""
    parallel = autopar.parallelize(step, planner=autopar.Zero(3), cluster=cluster)
    plan, graph = parallel.plan(WEIGHTS, X), parallel.step(WEIGHTS, X).graph
    assert isinstance(plan, Plan)
    return graph, resharding_plan(graph, plan.layout, Resharder(plan.mesh))


def test_a_gather_starts_at_the_product_with_the_weight_before():
    """The gradient of a layer's input multiplies by its weight: that of the next one is gathered meanwhile."""
    graph, plan = reshardings("4:h100")
    late = {
        move.value: index for index, moves in enumerate(plan.before) for move in moves if move.after_value is not None
    }
    early = {move.value: (index, move) for index, moves in plan.early.items() for move in moves}
    first, *others = sorted(late, key=late.__getitem__)
    assert len(others) == LAYERS - 2, "the first layer's input has no gradient"
    assert early.keys() == set(others)
    for before, value in zip((first, *others), others, strict=False):
        index, move = early[value]
        assert index == late[before]
        assert move.after_value in graph.nodes[index].inputs, "XLA would leave out of the barrier what nothing reads"


def test_nothing_starts_early_where_nothing_hides_it():
    _, plan = reshardings("4:cpu")
    assert not plan.early


@pytest.mark.parametrize("loss", [loss, recomputing, tied])
def test_early_gathers_change_no_result(loss: Any, monkeypatch: pytest.MonkeyPatch):
    """On CPUs nothing is gathered early unless we say that computing hides it."""
    monkeypatch.setattr(Resharder, "hides_gathers", True)
    step = partial(updated, loss)
    parallel = autopar.parallelize(step, planner=autopar.Zero(3))
    text = parallel.lower(WEIGHTS, X).as_text()
    assert text.count("optimization_barrier") >= LAYERS - 1
    for ours, expected in zip(parallel(WEIGHTS, X), jax.jit(step)(WEIGHTS, X), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_the_gathers_of_a_recomputed_layer_are_hidden_too():
    """A layer waits at a barrier for the gradient of its results: its weights are gathered behind its recomputation."""
    graph = autopar.parallelize(jax.grad(recomputing), cluster="4:h100").step(WEIGHTS, X).graph
    behind = Background.of(graph)
    barriers = [node for node in graph.nodes if node.primitive == "optimization_barrier"]
    hidden = [
        v for node in barriers for b, v in zip(node.inputs, node.outputs, strict=True) if b in graph.inputs[:LAYERS]
    ]
    assert len(hidden) == LAYERS
    assert all(behind.behind(value) for value in hidden)
