"""Values without elements need nothing of what they are made of: they bring no array whole to every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import autopar

FUNCTIONS: dict[str, Callable[[jax.Array], Any]] = {
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "joined with nothing": lambda x: jnp.concatenate([x[:, :0], x, x[:, 4:]], 1),
    "padding of nothing": lambda x: x + jnp.pad(x[:, :0] * 2, ((0, 0), (3, 1), (0, 0)), constant_values=1.5),
    "parts of nothing": lambda x: [jnp.sin(part) for part in jnp.split(x, (0, 4, 4), 1)][1],
    "one part of rows": lambda x: jnp.split(x, 1)[0],
    "rows and nothing": lambda x: jnp.split(x, (len(x),))[0],
    "flat and back": lambda x: ravel_pytree(x)[1](jnp.sin(ravel_pytree(x)[0])),
    "nothing but nothing": lambda x: (jnp.concatenate([x[:, :0], x[:, 4:]], 1).sum(1), x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slices_and_joins_without_elements_gather_nothing(name: str) -> None:
    """Slices and joins of `associative_scan`, and the one part of a split, as in `odeint`, gathered the batch."""

    def step(weight: jax.Array, batch: jax.Array) -> jax.Array:
        def loss(weight: jax.Array) -> jax.Array:
            results = FUNCTIONS[name](jnp.tanh(batch @ weight))
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(results))

        return weight - 0.1 * jax.grad(loss)(weight)

    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((4, 4), (16, 4, 4)))
    hand_made = autopar.parallelize(step, planner=autopar.DataParallel(), devices=jax.devices()[:2], microbatches=2)
    assert {c.kind for c in hand_made.plan(*args).collectives} == {"all_reduce"}
    np.testing.assert_allclose(hand_made(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-5)
