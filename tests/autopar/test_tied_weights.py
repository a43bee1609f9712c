"""A weight that is read as it is and transposed: its two gradients are added before they are reduced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.sample import slow

ROWS, WORDS, WIDTH = 4096, 2048, 256


def step(embedding: jax.Array, tokens: jax.Array) -> Any:
    """A language model without layers, whose weight is cast once for both readers."""

    def loss(embedding: jax.Array) -> jax.Array:
        cast = embedding.astype("bfloat16")
        logits = jnp.tanh(cast[tokens]) @ cast.T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(embedding.dtype)), tokens[:, None], 1).mean()

    return embedding - 0.1 * jax.grad(loss)(embedding)


def test_one_gradient_is_reduced() -> None:
    """The transpose between a product and the sum hid that there is nothing else to do: each was reduced."""
    given = jax.ShapeDtypeStruct((WORDS, WIDTH), "float32"), jax.ShapeDtypeStruct((ROWS,), "int32")
    plan = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(*given)
    assert [(c.kind, c.nbytes, c.count) for c in plan.collectives] == [("all_reduce", WORDS * WIDTH * 2, 1)]


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Zero(3)], ids=["data", "zero"])
def test_a_step_with_a_tied_weight_is_jits(planner: Any) -> None:
    draws = np.random.default_rng(0)
    embedding, tokens = jnp.asarray(draws.normal(size=(16, 8)), "float32"), jnp.asarray(draws.integers(0, 16, 32))
    got, wanted = autopar.parallelize(step, planner=planner)(embedding, tokens), jax.jit(step)(embedding, tokens)
    np.testing.assert_allclose(got, wanted, atol=1e-3)


def decayed(weight: jax.Array, x: jax.Array) -> jax.Array:
    """The decay's gradient needs no microbatch, and is the first of three that are added."""
    return jnp.mean((jnp.tanh(x @ weight) @ weight.T - x) ** 2) + 0.1 * jnp.sum(weight**2)


def beside(weight: jax.Array, x: jax.Array) -> jax.Array:
    other = jnp.linspace(-1.0, 1.0, 3 * weight.shape[0], dtype=weight.dtype).reshape(3, -1)
    layers = lambda rows: jnp.mean((jnp.tanh(rows @ weight) @ weight) ** 2)  # noqa: E731
    return layers(x) + layers(other)


def decayed_first(weight: jax.Array, x: jax.Array) -> jax.Array:
    return 0.1 * jnp.sum(weight**2) + jnp.mean((jnp.tanh(x @ weight) @ weight.T - x) ** 2)


@pytest.mark.parametrize("loss", [decayed, beside, slow(decayed_first)])
@pytest.mark.parametrize(
    "planner",
    [
        autopar.Pipeline(stages=2, microbatches=2),
        slow(autopar.Pipeline(stages=2, microbatches=4, schedule="gpipe")),
        slow(autopar.Pipeline(stages=2, microbatches=4, schedule="zero-bubble-h1")),
        slow(autopar.Megatron(data=2, tensor=2, pipeline=2, microbatches=2)),
    ],
)
def test_a_weight_of_two_stages_keeps_what_no_microbatch_has(planner: Any, loss: Any) -> None:
    """The sum of a stage began in its forward pass, from what the microbatch before had not added to yet."""

    def train(weight: jax.Array, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(weight, x)
        return weight - 0.1 * gradient, value

    draws = np.random.default_rng(0)
    with jax.enable_x64():
        weight, x = draws.normal(size=(16, 16)) / 4, draws.normal(size=(16, 16)) / 4
        got, wanted = autopar.parallelize(train, planner=planner)(weight, x), jax.jit(train)(weight, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), got, wanted)
