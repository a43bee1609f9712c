"""State that has the batch's rows, such as what a recurrent network hands on, stays where its rows are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

ROWS, STEPS, WIDTH = 64, 5, 8
PLANNERS = {"data": autopar.DataParallel(), "zero": autopar.Zero(3), "tensor": autopar.Megatron(data=4, tensor=2)}


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape) / 2


def step(state: Any, batch: jax.Array) -> Any:
    """Truncated backpropagation through time: the hidden rows begin where the last step has left them."""
    weights, momentum, hidden = state

    def cell(hidden: jax.Array, x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
        hidden = jnp.tanh(hidden @ weights["inner"] + x @ weights["outer"])
        return hidden, hidden

    def loss(weights: Any) -> Any:
        last, every = jax.lax.scan(lambda h, x: cell(h, x, weights), hidden, batch.swapaxes(0, 1))
        return jnp.mean(every**2), last

    (value, hidden), grads = jax.value_and_grad(loss, has_aux=True)(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, hidden), value


def arguments() -> Any:
    weights = {"inner": jnp.asarray(drawn(WIDTH, WIDTH)), "outer": jnp.asarray(drawn(WIDTH, WIDTH))}
    return (weights, jax.tree.map(jnp.zeros_like, weights), jnp.zeros((ROWS, WIDTH))), drawn(ROWS, STEPS, WIDTH)


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_state_of_rows_is_cut_as_the_batch_is(planner: Any):
    with jax.enable_x64(True):
        state, batch = arguments()
        parallel = autopar.parallelize(step, planner=planner)
        plan = parallel.plan(state, batch)
        assert [spec.dims[0] for spec in plan.inputs[-2:]] == [("data",), ("data",)]  # hidden rows and the batch
        assert not any(
            c.kind == "all_gather" and "data" in c.axes and c.nbytes == ROWS * WIDTH * 8 for c in plan.collectives
        )
        expected = state
        for _ in range(3):
            expected, value = jax.jit(step)(expected, batch)
            state, ours = parallel(state, batch)
            np.testing.assert_allclose(ours, value)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), state, expected)
