"""A train step of several equal layers, for tests of what is computed again and of memory limits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, ROWS, DEPTH = 64, 512, 4


def mlp(params: Any, batch: jax.Array) -> jax.Array:
    hidden = batch
    for up, down in params:
        hidden = hidden + jnp.tanh(jnp.tanh(hidden @ up) @ down)
    return jnp.sum(hidden**2)


def train_step(params: Any, batch: jax.Array) -> Any:
    value, grads = jax.value_and_grad(mlp)(params, batch)
    return optax.apply_updates(params, jax.tree.map(lambda g: -1e-3 * g, grads)), value


def arguments(dtype: str = "float32", depth: int = DEPTH) -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.1, dtype)

    return [(draw(WIDTH, 4 * WIDTH), draw(4 * WIDTH, WIDTH)) for _ in range(depth)], draw(ROWS, WIDTH)


OPTIMIZER = optax.sgd(0.01, momentum=0.9)


def momentum_step(state: Any, batch: jax.Array) -> Any:
    params, moments = state
    value, grads = jax.value_and_grad(lambda w: jnp.sum((jnp.tanh(batch @ w["up"]) @ w["down"]) ** 2) / 64)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def wide(dtype: str = "float32") -> Any:
    """A state of which parameters are most, and a small batch."""
    rng = np.random.default_rng(0)
    params = {
        "up": jnp.asarray(rng.normal(size=(64, 512)) * 0.1, dtype),
        "down": jnp.asarray(rng.normal(size=(512, 64)) * 0.1, dtype),
    }
    return (params, OPTIMIZER.init(params)), jnp.asarray(rng.normal(size=(16, 64)), dtype)
