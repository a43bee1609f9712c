"""Statistics of a batch, summed over its rows and broadcast to them again: plans send the sums, and no activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.sample import each

BY_HAND = [autopar.DataParallel(), autopar.Zero(3)]
WIDTH = 64


def divided(weight: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ weight
    centred = y - y.mean(0, keepdims=True)
    return jnp.sum(centred**2 / (centred**2 + 1).mean(0, keepdims=True))


def normed(weight: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ weight
    return jnp.sum(jnp.tanh(y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5))


def softened(weight: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ weight
    shares = jax.nn.softmax(y, axis=0)  # over the batch, as in assignments that are balanced
    return jnp.sum((shares - y) ** 2 / (1 + (shares * y).sum(0, keepdims=True) ** 2))


def whitened(weight: jax.Array, x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ weight)
    centred = y - y.mean(0)
    factor = jnp.linalg.cholesky(jnp.cov(y.T) + jnp.eye(weight.shape[1]))
    return jnp.sum((centred @ jnp.linalg.inv(factor)) ** 2)


def step_of(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda weight, x: weight - 0.1 * jax.grad(loss)(weight, x)


@pytest.mark.parametrize("planner", BY_HAND, ids=lambda planner: type(planner).__name__)
@pytest.mark.parametrize("loss", [divided, normed, softened, whitened])
def test_sums_over_the_batch_are_all_that_is_sent(loss: Callable[..., jax.Array], planner: Any):
    """The batch of a gradient that was summed and broadcast again was another class than that of what it met there."""
    types = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((65536, WIDTH), "float32")
    plan = autopar.parallelize(step_of(loss), planner=planner, cluster="8:a100-80g").plan(*types)
    assert max(collective.nbytes for collective in plan.collectives) <= types[0].size * 4


@pytest.mark.parametrize(("loss", "planner"), each([divided, normed, softened, whitened], [*BY_HAND, autopar.Auto()]))
def test_a_step_with_statistics_is_jits(loss: Callable[..., jax.Array], planner: Any):
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        weight, x = draws.normal(size=(8, 8)), draws.normal(size=(16, 8))
        got, wanted = (
            f(weight, x) for f in (autopar.parallelize(step_of(loss), planner=planner), jax.jit(step_of(loss)))
        )
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_running_maximum_is_reduced_where_it_is_scaled():
    """A scaled maximum of parts was taken for a sum of them: all rows were exchanged for columns."""

    def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight, largest = state
        largest = 0.9 * largest + 0.1 * jnp.max(jnp.abs(x @ weight), 0)
        return weight - 0.1 * jax.grad(divided)(weight, x), largest

    types = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((WIDTH,), "float32")
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g")
    plan = parallel.plan(types, jax.ShapeDtypeStruct((4096, WIDTH), "float32"))
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}


def test_gradients_of_several_losses_stay_on_their_rows():
    """Two rows of gradients were spread over the batch apart, and one of them could not be cut: rows were gathered."""

    def step(weights: tuple[jax.Array, ...], x: jax.Array) -> Any:
        def losses(weights: tuple[jax.Array, ...]) -> jax.Array:
            up, left, right = weights
            y = jnp.tanh(x @ up)
            return jnp.stack([jnp.sum((y @ left)[:, 0] ** 2), jnp.sum((y @ right)[:, 0] ** 3)])

        jacobians = jax.jacrev(losses)(weights)
        return jax.tree.map(lambda w, j: w - 0.1 * j[0] - 0.2 * j[1], weights, jacobians)

    types = [
        jax.ShapeDtypeStruct(shape, "float32") for shape in ((WIDTH, WIDTH), (WIDTH, 1), (WIDTH, 1), (4096, WIDTH))
    ]
    plan = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(types[:3], types[3])
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}
