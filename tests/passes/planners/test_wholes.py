"""Data parallelism that computes most of a step whole on every device says so, and where."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from passes.planners.wholes import MOST

PARAMS = {"in": jnp.ones((16, 32)), "hidden": jnp.ones((32, 32))}


def over_time(params: Any, inputs: jax.Array) -> jax.Array:
    def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ params["in"] + state @ params["hidden"]), None

    return (lax.scan(cell, jnp.zeros((inputs.shape[1], 32)), inputs)[0] ** 2).mean()


def of_one_sequence(params: Any, inputs: jax.Array) -> jax.Array:
    def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ params["in"] + state @ params["hidden"]), None

    return (lax.scan(cell, jnp.zeros(32), inputs[:, 0])[0] ** 2).mean()


def dense(params: Any, inputs: jax.Array) -> jax.Array:
    return (jnp.tanh(inputs @ params["in"]) @ params["hidden"]).mean()


def planned(loss: Any, planner: Any, rows: int = 16) -> None:
    def step(params: Any, inputs: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, inputs)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    autopar.parallelize(step, cluster="8:a100-80g", planner=planner).plan(PARAMS, jnp.ones((rows, 64, 16)))


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Zero(3)])
def test_a_loop_over_what_is_taken_for_the_batch_is_said(planner: Any) -> None:
    with pytest.warns(UserWarning, match="of the work of products is computed whole on every device") as caught:
        planned(of_one_sequence, planner)
    (warning,) = caught
    words = str(warning.message)
    line = of_one_sequence.__code__.co_firstlineno + 2  # in the cell
    assert re.search(rf"most of it at \S*test_wholes.py:{line} ", words)
    assert "taken for the batch: inputs float32[16,64,16]" in words
    assert float(words.split(": ")[1].split(" %")[0]) > 100 * MOST
    assert "in the loop at" in words
    assert "put the batch first" in words


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Zero(3)])
@pytest.mark.parametrize("loss", [dense, over_time])
def test_there_is_no_warning_where_state_and_batch_are_cut(planner: Any, loss: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned(loss, planner)
    assert not caught


@pytest.mark.parametrize("loss", [of_one_sequence, dense])
def test_time_that_devices_do_not_divide_is_no_batch_too_small(loss: Any) -> None:
    """Of 20 steps of a recurrent network the error said no more than to use a batch of 24."""
    with pytest.raises(autopar.PlanningError, match="use a batch of 24") as caught:
        planned(loss, autopar.DataParallel(), rows=20)
    assert ("put the batch first" in str(caught.value)) == (loss is of_one_sequence)


@pytest.mark.parametrize(("rows", "are_inner"), [(2, True), (12, False), (1, False)])
def test_views_that_lead_are_no_batch_too_small(rows: int, are_inner: bool) -> None:
    """Of two views of 64 rows the error said no more than to use a batch of 8."""
    with pytest.raises(autopar.PlanningError, match="do not divide its leading dimension") as caught:
        planned(dense, autopar.DataParallel(), rows=rows)
    assert ("put them first in what the step takes" in str(caught.value)) == are_inner


def test_views_that_are_put_together_are_of_the_batch() -> None:
    """Beside labelled rows: what two arguments become was computed whole on every device."""

    def step(params: Any, labelled: jax.Array, weak: jax.Array, strong: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            target, made = jnp.split(jnp.tanh(jnp.concatenate([weak, strong]) @ params["in"]), 2)
            return jnp.mean(jnp.tanh(labelled @ params["in"]) + (lax.stop_gradient(target) - made) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), "float32"), PARAMS)
    views = [jnp.asarray(draw.normal(size=(16, 16)), "float32") for _ in range(3)]
    parallel = autopar.parallelize(step, planner=autopar.DataParallel())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel.plan(params, *views)
    assert not caught
    for ours, theirs in zip(
        jax.tree.leaves(parallel(params, *views)), jax.tree.leaves(jax.jit(step)(params, *views)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_key_and_a_count_have_nothing_to_cut() -> None:
    """ZeRO-1 of plain gradient descent said that the key stays whole, and to pad it."""

    def step(state: Any, inputs: jax.Array) -> Any:
        params, key, count = state
        grads = jax.grad(lambda p: dense(p, inputs + jax.random.normal(key, inputs.shape)))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jax.random.split(key, 1)[0], count + 1

    state = PARAMS, jax.random.key(0), jnp.zeros((), "int32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autopar.parallelize(step, cluster="8:a100-80g", planner=autopar.Zero(1)).plan(state, jnp.ones((16, 64, 16)))
    assert not caught
