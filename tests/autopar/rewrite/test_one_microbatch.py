"""A pipeline of one microbatch computes any step: what couples rows of a batch couples no microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from tests.sample import slow


def _normalised(x: jax.Array, axis: int) -> jax.Array:
    mean = x.mean(axis, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(axis, keepdims=True) + 1e-3)


def layer_norm(x: jax.Array) -> jax.Array:
    return _normalised(x, -1)


def batch_norm(x: jax.Array) -> jax.Array:
    return _normalised(x, 0)


def contrastive(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x @ x.T) @ x


def in_order(x: jax.Array) -> jax.Array:
    return x[jnp.argsort(x[:, 0])] * jnp.arange(x.shape[0])[:, None]


def halved(x: jax.Array) -> jax.Array:
    """Divided until it is small: the loop's test depends on the batch."""
    times = lax.while_loop(lambda n: jnp.max(jnp.abs(lax.stop_gradient(x))) > 0.1 * 2.0**n, lambda n: n + 1, 0)
    return x / 2.0**times


def recurrent(x: jax.Array) -> jax.Array:
    """A loop over the rows."""
    return lax.scan(lambda carry, row: (jnp.tanh(carry + row),) * 2, jnp.zeros_like(x[0]), x)[1]


def either(x: jax.Array) -> jax.Array:
    """A branch that the batch chooses."""
    return lax.cond(x.sum() > 0, lambda x: 2 * x, jnp.sin, x)


def iterated(x: jax.Array) -> jax.Array:
    """A loop that begins with a row and goes on with sums over rows."""
    return x + lax.fori_loop(0, 2, lambda _, v: jnp.tanh(x.T @ (x @ v) / 64), x[0])


CASES = [
    *((layer_norm, 1), (batch_norm, 8), (iterated, 8)),
    *((layer_norm, 8), (batch_norm, 1), (iterated, 1), (either, 1), (either, 8)),
    *itertools.product((contrastive, in_order, halved, recurrent), (1, 8)),
]


@pytest.mark.parametrize(("coupling", "rows"), [*CASES[:3], *(slow(*case) for case in CASES[3:])])
def test_rows_that_need_each_other_are_in_one(coupling: Callable[[jax.Array], jax.Array], rows: int) -> None:
    draw = np.random.default_rng(0)
    weights = [tuple(draw.normal(size=shape) / 4 for shape in ((16, 32), (32, 16))) for _ in range(4)]
    x, y = draw.normal(size=(2, rows, 16))

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for up, down in weights:
                h = h + jnp.tanh(coupling(h) @ up) @ down
            return jnp.sum((h - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value

    with jax.enable_x64(True):
        planner = autopar.Pipeline(stages=2, microbatches=1)
        step_of_stages = autopar.parallelize(step, planner=planner, batch_argnums=(1, 2))
        results, expected = step_of_stages(weights, x, y), jax.jit(step)(weights, x, y)
        assert len(step_of_stages.plan(weights, x, y).stages) == 2
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_two_microbatches_are_refused_for_one() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.sum(batch_norm(jnp.tanh(batch_norm(x @ w)) @ w)))(w)
        return w - gradient, value

    with pytest.raises(autopar.PlanningError, match="in a pipeline write microbatches=1"):
        autopar.parallelize(step, planner=autopar.Pipeline(stages=2, microbatches=2))(
            jnp.ones((8, 8)), jnp.ones((4, 8))
        )


def test_a_loop_over_layers_carries_embeddings_as_their_rows_lie():
    """A gather has several dimensions that one microbatch could be cut along, and its table's are none of the batch."""
    draws = np.random.default_rng(0)
    weights = {"words": draws.normal(size=(24, 8)), "layers": 0.1 * draws.normal(size=(4, 8, 8))}
    tokens = draws.integers(0, 24, size=(8, 4))

    def loss(weights: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), weights["words"][tokens], weights["layers"])
        return (x**2).sum()

    def step(weights: dict[str, jax.Array], tokens: jax.Array) -> dict[str, jax.Array]:
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, jax.grad(loss)(weights, tokens))

    with jax.enable_x64(True):
        parallel = autopar.parallelize(step, planner=autopar.GPipe(stages=2, microbatches=1))
        made, wanted = parallel(weights, tokens), jax.jit(step)(weights, tokens)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), made, wanted)


def test_an_actor_may_learn_from_a_critic_that_has_been_updated():
    """The critic's gradients are clipped together, and the actor's loss is of the critic that comes of that."""

    def step(state: Any, observed: jax.Array, returns: jax.Array) -> Any:
        critic, actor = state

        def valued(critic: Any, acted: jax.Array) -> jax.Array:
            return (jnp.tanh(jnp.concatenate([observed, acted], 1) @ critic["up"]) @ critic["down"])[:, 0]

        error, gradients = jax.value_and_grad(lambda c: jnp.mean((valued(c, jnp.ones((8, 2))) - returns) ** 2))(critic)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients.values()))
        critic = jax.tree.map(lambda c, g: c - 0.1 * g / jnp.maximum(norm, 1.0), critic, gradients)
        value, gradient = jax.value_and_grad(lambda a: -jnp.mean(valued(critic, jnp.tanh(observed @ a))))(actor)
        return (critic, actor - 0.1 * gradient), (error, value)

    with jax.enable_x64(True):
        draw = np.random.default_rng(0).normal
        state = {"up": draw(size=(6, 8)), "down": draw(size=(8, 1))}, draw(size=(4, 2))
        given = state, draw(size=(8, 4)), draw(size=8)
        parallel = autopar.parallelize(step, planner=autopar.Pipeline(stages=2, microbatches=1))
        made, wanted = parallel(*given), jax.jit(step)(*given)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), made, wanted)
