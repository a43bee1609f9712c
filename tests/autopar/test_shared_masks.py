"""Attention in which all layers share what does not depend on them: positions, a mask, biases by distance (ALiBi)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

HEADS = 4


def loss(layers: Any, x: jax.Array) -> jax.Array:
    rows, length, _ = x.shape
    ahead = jnp.arange(length)[None] - jnp.arange(length)[:, None]
    slopes = 2.0 ** (-8 * (jnp.arange(HEADS) + 1) / HEADS)
    for weights in layers:
        q = (x @ weights).reshape(rows, length, HEADS, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, q) + slopes[:, None, None] * ahead
        attention = jax.nn.softmax(jnp.where(ahead <= 0, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", attention, q).reshape(x.shape)
    return jnp.mean(x**2)


def step(layers: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(layers, x)
    return jax.tree.map(lambda w, g: w - g, layers, gradients), value


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Auto()], ids=["data", "auto"])
def test_each_layer_keeps_the_scores_of_its_rows(planner: autopar.Planner):
    """The mask had the scores of both layers in one operator group: rows of one were gathered, 32 MiB of scores."""
    types = [jax.ShapeDtypeStruct((256, 256), "float32")] * 2, jax.ShapeDtypeStruct((32, 256, 256), "float32")
    plan = autopar.parallelize(step, planner=planner, cluster="8:a100-80g").plan(*types)
    assert all(c.nbytes <= 256 * 256 * 4 for c in plan.collectives)


def test_the_step_is_jits():
    draw = np.random.default_rng(0)
    with jax.enable_x64():
        args: Any = [draw.normal(size=(16, 16)) for _ in range(2)], draw.normal(size=(8, 8, 16))
        ours = autopar.parallelize(step, planner=autopar.DataParallel())(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), ours, jax.jit(step)(*args))
