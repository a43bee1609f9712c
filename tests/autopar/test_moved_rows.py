"""Rows that are put one behind another, shifted or shuffled: data parallelism cuts them where they go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

ROWS, WIDTH, WIDER = 4096, 64, 256
MOST = 3
"""So many times the rows of the batch are there after a move, at most."""


def views(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, -x])


def halves(x: jax.Array) -> jax.Array:
    return jnp.split(x, 2)[1]


def samples(x: jax.Array) -> jax.Array:
    """Several of each row, which is no reshape that keeps the rows of a device together."""
    return jnp.broadcast_to(x, (2, *x.shape)).reshape(-1, x.shape[1])


def partners(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x[::-1], jnp.roll(x, 2, axis=0), jnp.pad(x, ((1, len(x) - 1), (0, 0)))], axis=0)


def shuffled(x: jax.Array) -> jax.Array:
    return x[jnp.argsort(x[:, 0])]


def step_of(moved: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    def step(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        up, down = weights

        def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
            return jnp.sum(jnp.tanh(moved(x) @ weights[0] @ weights[1]) ** 2)

        grads = jax.grad(loss)(weights)
        return up - 1e-4 * grads[0], down - 1e-4 * grads[1]

    return step


MOVES = (views, halves, samples, partners, shuffled)


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Zero(3)], ids=["data", "zero"])
@pytest.mark.parametrize("moved", MOVES)
def test_each_device_multiplies_rows_of_its_own(moved: Callable[[jax.Array], jax.Array], planner: Any):
    """All devices multiplied all rows, as none were followed through the move."""
    types = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"), jax.ShapeDtypeStruct((WIDTH, WIDER), "float32")
    weights = types[1], jax.ShapeDtypeStruct((WIDER, WIDTH), "float32")
    parallel = autopar.parallelize(step_of(moved), planner=planner, cluster="8:a100-80g")
    plan = parallel.plan(weights, types[0])
    kind, nbytes = ("all_reduce", 1) if isinstance(planner, autopar.DataParallel) else ("reduce_scatter", 8)
    assert any(c.kind == kind and c.nbytes == WIDTH * WIDER * 4 // nbytes for c in plan.collectives)
    assert all(c.nbytes <= MOST * ROWS * WIDTH * 4 for c in plan.collectives if c.kind == "all_gather")


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Zero(3)], ids=["data", "zero"])
@pytest.mark.parametrize("moved", MOVES)
def test_a_step_that_moves_rows_is_jits(moved: Callable[[jax.Array], jax.Array], planner: Any):
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        weights = tuple(jnp.asarray(draws.normal(size=shape)) for shape in ((8, 16), (16, 8)))
        x = jnp.asarray(draws.normal(size=(16, 8)))
        step = step_of(moved)
        got, wanted = autopar.parallelize(step, planner=planner)(weights, x), jax.jit(step)(weights, x)
        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


EXPERTS, SLOTS = 8, 1024


def experts_step(weights: tuple[jax.Array, jax.Array, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
    """A step of experts, each of which takes the next free one of its slots for every row that the router sends it."""

    def loss(weights: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        router, up, down = weights
        scores = jax.nn.softmax(x @ router)
        expert = jnp.argmax(scores, axis=-1)
        chosen = jax.nn.one_hot(expert, EXPERTS, dtype="int32")
        place = (jnp.cumsum(chosen, axis=0) * chosen).sum(axis=-1) - 1
        slots = len(x) // 4
        slot = jnp.where(place < slots, expert * slots + place, EXPERTS * slots)
        rows = jnp.zeros((EXPERTS * slots, x.shape[1]), x.dtype).at[slot].add(x, mode="drop")
        hidden = jnp.tanh(jnp.einsum("esd,edf->esf", rows.reshape(EXPERTS, slots, -1), up))
        made = jnp.einsum("esf,efd->esd", hidden, down).reshape(EXPERTS * slots, -1)
        taken = made.at[slot].get(mode="fill", fill_value=0) * scores.max(axis=-1, keepdims=True)
        return jnp.mean((x + taken) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value


def experts_weights(width: int, wider: int) -> tuple[tuple[int, ...], ...]:
    return (width, EXPERTS), (EXPERTS, width, wider), (EXPERTS, wider, width)


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Megatron(data=8, tensor=1)], ids=["data", "mega"])
def test_the_gradients_of_experts_are_computed_where_their_slots_are(planner: Any):
    """Slots were cut in the forward pass, and what experts made of all of them gathered for their gradients."""
    weights = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in experts_weights(256, 1024))
    x = jax.ShapeDtypeStruct((4 * SLOTS, 256), "float32")
    plan = autopar.parallelize(experts_step, planner=planner, cluster="8:a100-80g").plan(weights, x)
    assert all(c.nbytes < EXPERTS * SLOTS * 1024 * 4 for c in plan.collectives)  # what is hidden in the experts
    alone = autopar.parallelize(experts_step, cluster="1:a100-80g").plan(weights, x)
    assert sum(plan.computing.values()) < sum(alone.computing.values()) / 2


def test_experts_that_take_rows_to_slots_are_jits():
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        weights = tuple(jnp.asarray(draws.normal(size=shape)) for shape in experts_weights(8, 16))
        x = jnp.asarray(draws.normal(size=(64, 8)))
        got = autopar.parallelize(experts_step, planner=autopar.DataParallel())(weights, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), got, jax.jit(experts_step)(weights, x))
