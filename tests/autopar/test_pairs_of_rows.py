"""Losses that compare all rows with each other send the rows once, and their gradients once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

ROWS, WIDTH = 64, 8


def hardest(rows: jax.Array, labels: jax.Array) -> jax.Array:
    """The triplet loss of each row's farthest row of its label and nearest of another."""
    distances = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    alike = labels[:, None] == labels[None]
    farthest = jnp.where(alike, distances, -jnp.inf).max(1)
    nearest = jnp.where(alike, jnp.inf, distances).min(1)
    return jax.nn.relu(farthest - nearest + 0.3).mean()


def repelled(rows: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean potential of all pairs, a product of differences."""
    return jnp.exp(-((rows[:, None] - rows[None]) ** 2).sum(-1)).mean() + 0.0 * labels.sum()


@pytest.mark.parametrize("loss", [hardest, repelled])
def test_rows_and_their_gradients_are_sent_once(loss: Any):
    def step(weight: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda w: loss(jnp.tanh(x @ w), labels))(weight)
        return weight - 0.1 * gradient, value

    draw = np.random.default_rng(0)
    given = draw.normal(size=(WIDTH, WIDTH)), draw.normal(size=(ROWS, WIDTH)), draw.integers(0, 4, ROWS)
    with jax.enable_x64(True):
        parallel = autopar.parallelize(step, planner=autopar.DataParallel())
        plan = parallel.plan(*given)
        sent = [(c.kind, c.nbytes) for c in plan.collectives for _ in range(c.count) if c.nbytes > ROWS * 8]
        rows = [("all_gather", ROWS * WIDTH * 8)]
        assert [each for each in sent if each != ("all_reduce", WIDTH * WIDTH * 8)] == rows
        assert sum(c.nbytes * c.count for c in plan.collectives if c.kind == "reduce_scatter") == ROWS * WIDTH
        for ours, theirs in zip(parallel(*given), jax.jit(step)(*given), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
