"""Weights in loops under ZeRO-3: a cell's are fetched once for all steps, a layer's when it runs, and those of a whole
model in each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

STEPS, LAYERS, WIDTH = 12, 3, 16
Loss = Callable[[Any, jax.Array], jax.Array]


def recurrent(weights: Any, x: jax.Array) -> jax.Array:
    def cell(hidden: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = jnp.tanh(hidden @ weights["inner"] + x @ weights["outer"])
        return hidden, hidden

    states = jnp.broadcast_to(x, (STEPS, *x.shape))
    return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(x), states)[1] ** 2)


def in_layers(weights: Any, x: jax.Array) -> jax.Array:
    def layer(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(hidden @ weight), None

    return jnp.mean(jax.lax.scan(layer, x, weights["stack"])[0] ** 2)


def step_of(loss: Loss) -> Callable[..., Any]:
    def step(weights: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step


def accumulated(weights: Any, x: jax.Array) -> Any:
    def add(total: Any, rows: jax.Array) -> tuple[Any, None]:
        grads = jax.grad(lambda w: jnp.mean(jnp.tanh(rows @ w["up"]) @ w["down"] ** 2))(weights)
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), x.reshape(2, -1, x.shape[-1]))
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, total)


def drawn(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape) / 4


CASES: dict[str, tuple[Callable[..., Any], Any, int]] = {
    "recurrent": (step_of(recurrent), {"inner": drawn(WIDTH, WIDTH), "outer": drawn(WIDTH, WIDTH)}, 3),
    "layers": (step_of(in_layers), {"stack": drawn(LAYERS, WIDTH, WIDTH)}, 2 * LAYERS),
    "microbatches": (accumulated, {"up": drawn(WIDTH, WIDTH), "down": drawn(WIDTH, WIDTH)}, 2 * 3),
}
"""Steps with the most gathers of one matrix that they take: forward and backward, where a gradient needs it."""


@pytest.mark.parametrize("case", CASES)
def test_weights_are_fetched_as_often_as_they_change(case: str):
    step, weights, most = CASES[case]
    types = jax.eval_shape(lambda: jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights))
    batch = jax.ShapeDtypeStruct((4096, WIDTH), "float32")
    plan = autopar.parallelize(step, planner=autopar.Zero(3), cluster="8:a100-80g").plan(types, batch)
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    assert sum(c.count for c in gathers) <= most
    assert {c.nbytes for c in gathers} == {WIDTH * WIDTH * 4}  # never a stack of layers, nor a batch


@pytest.mark.parametrize("case", CASES)
def test_every_gather_is_priced(case: str):
    """A loop of the backward pass gathers again what the forward pass gathered, and the search reckons with both."""
    step, weights, _ = CASES[case]
    wide = jax.tree.map(lambda w: jax.ShapeDtypeStruct((*w.shape[:-2], 256, 256), "float32"), weights)
    batch = jax.ShapeDtypeStruct((64, 256), "float32")
    plan = autopar.parallelize(step, planner=autopar.Zero(3), cluster="2x4:v100-16g").plan(wide, batch)
    assert plan.solution.objective == pytest.approx(plan.step_seconds, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_step_with_weights_in_loops_is_jits(case: str):
    step, weights, _ = CASES[case]
    with jax.enable_x64(True):
        x = drawn(32, WIDTH)
        got, wanted = autopar.parallelize(step, planner=autopar.Zero(3))(weights, x), jax.jit(step)(weights, x)
        for mine, theirs in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_a_decay_that_two_carries_share_sends_no_rows():
    """As in RWKV (Peng et al. 2023), a weighted mean has a numerator and a denominator. Both parts of the gradient were
    placed as one, and one of them had its rows gathered in each iteration.
    """

    def weighted(weights: Any, x: jax.Array) -> jax.Array:
        x, decay = jnp.moveaxis(x, 1, 0), jnp.exp(-jnp.exp(weights["outer"][0]))

        def cell(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            above, below, key, value = *carry, *inputs
            above, below = decay * above + jnp.exp(key) * value, decay * below + jnp.exp(key)
            return (above, below), above / below

        begin = jnp.zeros_like(x[0]), jnp.ones_like(x[0])
        return jnp.mean((jax.lax.scan(cell, begin, (x @ weights["inner"], x))[1] - x) ** 2)

    types = {name: jax.ShapeDtypeStruct((256, 256), "float32") for name in ("inner", "outer")}
    parallel = autopar.parallelize(
        step_of(weighted), planner=autopar.DataParallel(), cluster="8:a100-80g", batch_argnums=1
    )
    plan = parallel.plan(types, jax.ShapeDtypeStruct((512, STEPS, 256), "float32"))
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}
