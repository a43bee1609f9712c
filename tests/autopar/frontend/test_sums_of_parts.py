"""Derivatives of what is read in slices are those of the slices joined, however the slices are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

WEIGHTS = jnp.arange(48.0).reshape(3, 4, 4) / 48
X = jnp.arange(8.0).reshape(2, 4) / 8


def through(x: jax.Array, weights: Any) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x)


def dynamic(stack: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def primitives(gradient: Callable[..., Any], *args: Any) -> list[str]:
    graph = autopar.parallelize(gradient).step(*args).graph
    return [node.primitive for node in graph.nodes]


@pytest.mark.parametrize(
    ("loss", "operands"),
    [
        (lambda w, x: through(x, [w[0], w[1], w[2]]), 3),
        (lambda w, x: through(x, [w[2], w[0]]), 3),
        (lambda w, x: through(x, [w[2]]) + through(x, [w[0]]), 3),
        (lambda w, x: through(x, [dynamic(w, i) for i in range(3)]), 3),
        (lambda w, x: through(x, [w[0], dynamic(w, 1), w[2]]), 3),
    ],
    ids=["indexed", "with a hole", "summed apart", "dynamic", "both"],
)
def test_slices_of_weights_have_one_joined_derivative(loss: Callable[..., jax.Array], operands: int):
    gradient = jax.grad(loss)
    np.testing.assert_array_equal(autopar.parallelize(gradient)(WEIGHTS, X), jax.jit(gradient)(WEIGHTS, X))
    graph = autopar.parallelize(gradient).step(WEIGHTS, X).graph
    joined = [len(node.inputs) for node in graph.nodes if node.primitive == "concatenate"]
    assert joined == [operands]
    assert "pad" not in primitives(gradient, WEIGHTS, X)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: through(x, [w[1]]),
        lambda w, x: through(x, [w[0], w[0]]),
        lambda w, x: jnp.sum(jnp.sin(w[:2])) + jnp.sum(jnp.cos(w[1:])),
        lambda w, x: jnp.sum(jnp.sin(w[::2])) + jnp.sum(jnp.cos(w[1::2])),
        lambda w, x: jnp.sum(jnp.sin(w[:, :2])) + jnp.sum(jnp.cos(w[:, 2:])),
    ],
    ids=["one part", "one part twice", "overlapping", "interleaved", "of another dimension"],
)
def test_other_sums_stay_as_they_are(loss: Callable[..., jax.Array]):
    gradient = jax.grad(loss)
    np.testing.assert_allclose(autopar.parallelize(gradient)(WEIGHTS, X), jax.jit(gradient)(WEIGHTS, X), rtol=1e-5)
    assert "concatenate" not in primitives(gradient, WEIGHTS, X)


def test_a_part_beside_a_number_that_is_not_zero_stays_a_sum():
    def gradient(x: jax.Array) -> Any:
        padded = jax.lax.pad(x, jnp.float32(1), [(0, 2, 0), (0, 0, 0)])
        return jax.vjp(lambda y: (y, y), padded)[1]((padded, jax.lax.pad(x, 0.0, [(2, 0, 0), (0, 0, 0)])))[0]

    np.testing.assert_array_equal(autopar.parallelize(gradient)(X), jax.jit(gradient)(X))
    assert "concatenate" not in primitives(gradient, X)
