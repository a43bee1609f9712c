"""Loops of one iteration, and branches that are known when a step is traced, are what they run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from tests.autopar.frontend.tracing import primitives, traced

WEIGHT = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), "float32")
X = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), "float32")


def layers(w: jax.Array, x: jax.Array) -> Any:
    """A stack of one layer, with what each layer leaves behind."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w)
        return h, h.sum(-1)

    return lax.scan(layer, x, w[None])


def accumulated(w: jax.Array, x: jax.Array) -> Any:
    """Gradients that are added up over parts of the batch, of which there is one."""

    def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(rows @ w) ** 2))(w), None

    return w - 0.1 * lax.scan(add, jnp.zeros_like(w), x[None], reverse=True)[0]


def mapped(w: jax.Array, x: jax.Array) -> Any:
    return lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=len(x))


def keys(w: jax.Array, x: jax.Array) -> Any:
    return lax.scan(
        lambda x, key: (x + jax.random.normal(key, x.shape), key), x, jax.random.split(jax.random.key(0), 1)
    )


def chosen(index: Any) -> Any:
    return lambda w, x: lax.switch(index, [lambda x: x @ w, lambda x: x + 1, lambda x: x * 2], x)


def training(w: jax.Array, x: jax.Array) -> Any:
    loss = lambda w: jnp.sum(lax.cond(True, lambda x: jnp.tanh(x @ w), lambda x: x, x) ** 2)  # noqa: E731
    return w - 0.1 * jax.grad(loss)(w)


CASES = {
    "layers": layers,
    "gradient of layers": lambda w, x: jax.grad(lambda w: jnp.sum(layers(w, x)[0] ** 2))(w),
    "accumulated": accumulated,
    "mapped": mapped,
    "keys": keys,
    "first branch": chosen(-3),
    "second branch": chosen(1),
    "last branch": chosen(7),
    "training": training,
}


def values(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree, keys as the numbers that they are made of."""
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


@pytest.mark.parametrize("case", CASES)
def test_neither_loop_nor_branch_is_left(case: str):
    graph = traced(CASES[case], WEIGHT, X).graph
    assert not {"scan", "cond", "while"}.intersection(primitives(graph))
    for ours, expected in zip(
        values(autopar.parallelize(CASES[case])(WEIGHT, X)), values(jax.jit(CASES[case])(WEIGHT, X)), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_loop_of_two_iterations_and_a_branch_that_is_computed_stay():
    twice = traced(lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, jnp.stack([w, w])), WEIGHT, X).graph
    computed = traced(lambda w, x: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x), WEIGHT, X).graph
    assert "scan" in primitives(twice)
    assert "cond" in primitives(computed)


def test_one_microbatch_by_hand_is_planned_as_none():
    """A loop over one part of a batch, as scripts have that accumulate gradients over a number of steps."""
    args = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")

    def at_once(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    looped, plain = (
        autopar.parallelize(step, cluster="8:a100-80g", planner=autopar.DataParallel(), donate_argnums=0).plan(*args)
        for step in (accumulated, at_once)
    )
    assert looped.step_seconds <= 1.1 * plain.step_seconds  # 1.6 as a loop
