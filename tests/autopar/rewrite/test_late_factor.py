"""Losses of a mean, whose gradients have a factor that the whole batch decides: in microbatches and stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.frontend import trace
from autopar.rewrite.late_factor import with_late_factor
from tests.closeness import assert_close
from tests.sample import each

ROWS, WIDTH, LAYERS = 32, 8, 4
Params = dict[str, jax.Array]
DRAWS = np.random.default_rng(0)
PARAMS = {"layers": DRAWS.normal(size=(LAYERS, WIDTH, WIDTH)) / 3, "shift": DRAWS.normal(size=(LAYERS, WIDTH))}
BATCH = DRAWS.normal(size=(2, ROWS, WIDTH))


def network(p: Params, x: jax.Array, wrap: Callable[..., Any] = lambda layer: layer) -> jax.Array:
    layer = wrap(lambda h, w: (h + jnp.tanh(h @ w[0] + w[1]), None))
    return lax.scan(layer, x, (p["layers"], p["shift"]))[0]


def root_mean_square(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean((network(p, x) - y) ** 2))


def recomputed(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.linalg.norm(network(p, x, jax.checkpoint) - y) / jnp.linalg.norm(y)


def written_out(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """The logarithm of a mean, of layers that are no loop, beside a penalty on weights."""
    for w in p["layers"]:
        x = x + jnp.tanh(x @ w)
    return -jnp.log(jnp.mean(jax.nn.sigmoid((x * y).sum(-1)))) + 0.1 * jnp.sum(p["layers"] ** 2)


def of_those_that_count(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Errors of rows that the network is sure of, divided by how many these are."""
    answer = network(p, x)
    sure = lax.stop_gradient((jnp.abs(answer).max(-1) > 1.5).astype(x.dtype))
    return jnp.sum(sure * ((answer - y) ** 2).sum(-1)) / jnp.maximum(sure.sum(), 1)


def squared(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.abs(network(p, x) - y)) ** 2


LOSSES = (root_mean_square, recomputed, written_out, of_those_that_count, squared)
WAYS: tuple[dict[str, Any], ...] = (
    {"planner": autopar.DataParallel(), "microbatches": 4},
    {"microbatches": 2},
    {"planner": autopar.Pipeline(stages=2, microbatches=2)},
)


def step_of(loss: Callable[..., jax.Array]) -> Callable[..., tuple[Params, jax.Array]]:
    def step(p: Params, batch: jax.Array) -> tuple[Params, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(p, batch[:, 0], batch[:, 1])
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient), value

    return step


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("loss", "way"), each(LOSSES, WAYS))
def test_the_step_is_jits(loss: Callable[..., jax.Array], way: dict[str, Any]) -> None:
    """Microbatches of them were refused: the backward pass began with what needed all of the forward pass."""
    batch = BATCH.swapaxes(0, 1)
    assert_close(autopar.parallelize(step_of(loss), **way)(PARAMS, batch), jax.jit(step_of(loss))(PARAMS, batch))


def test_gradients_are_reduced_once() -> None:
    args = jax.eval_shape(lambda: (PARAMS, BATCH.swapaxes(0, 1)))
    plan = autopar.parallelize(
        step_of(root_mean_square), cluster="8:a100-80g", planner=autopar.DataParallel(), microbatches=4
    ).plan(*args)
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    assert all(c.count == 1 for c in plan.collectives)


def test_a_loss_in_bfloat16_layers_is_jits() -> None:
    def loss(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        return jnp.sqrt(jnp.mean((network(narrow, x.astype(jnp.bfloat16)).astype(jnp.float32) - y) ** 2))

    args = jax.tree.map(lambda x: x.astype(np.float32), (PARAMS, BATCH.swapaxes(0, 1)))
    parallel = autopar.parallelize(step_of(loss), planner=autopar.DataParallel(), microbatches=4)
    assert_close(parallel(*args), jax.jit(step_of(loss))(*args), tolerance=1e-2)


def two_factors(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    error = network(p, x) - y
    return jnp.sqrt(jnp.mean(error**2)) + jnp.sqrt(jnp.mean(error**4))


def in_half_precision(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    narrow = jax.tree.map(lambda w: w.astype(jnp.float16), p)
    return jnp.sqrt(jnp.mean((network(narrow, x.astype(jnp.float16)).astype(jnp.float32) - y) ** 2))


@pytest.mark.parametrize("loss", [two_factors, in_half_precision])
def test_other_steps_stay_as_they_are(loss: Callable[..., jax.Array]) -> None:
    """Two factors would take two backward passes; float16 may not hold gradients without theirs."""
    assert with_late_factor(trace(step_of(loss), (PARAMS, BATCH.swapaxes(0, 1)), {})) is None
