"""A weight that is read as it is and transposed: its two gradients are added before they are reduced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

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
