"""A batch of one row: that no device has a part of it is said of it, not of weights; what needs no part is planned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Auto, DataParallel, Megatron, Zero
from passes.errors import PlanningError

CLUSTER = "4:a100-80g"
WIDTH, LENGTH, WORDS = 32, 16, 64


def prefilled(params: Any, tokens: jax.Array) -> jax.Array:
    """Scores of the words of a prompt; nothing is updated, so that weights are inputs as tokens are."""
    x = params["table"][tokens]
    for block in params["blocks"]:
        q, k, v = jnp.split(x @ block["qkv"], 3, -1)
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        x = x + jnp.tanh(jnp.einsum("bqk,bkd->bqd", weights, v) @ block["up"]) @ block["down"]
    return x @ params["head"]


def trained(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def prompt(rows: int) -> tuple[Any, np.ndarray]:
    draw = np.random.default_rng(0).normal
    block = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {
        "table": draw(size=(WORDS, WIDTH)),
        "blocks": [{name: draw(size=shape) / WIDTH for name, shape in block.items()} for _ in range(2)],
        "head": draw(size=(WIDTH, WORDS)),
    }
    return params, np.arange(rows * LENGTH).reshape(rows, LENGTH) % WORDS


def example(rows: int) -> tuple[Any, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0).normal
    params = {name: draw(size=(WIDTH, WIDTH)) / WIDTH for name in "abc"}
    return params, draw(size=(rows, WIDTH)), draw(size=(rows, WIDTH))


def assert_equals_jit(step: Any, planner: Any, *args: Any) -> None:
    with jax.enable_x64():
        ours = autopar.parallelize(step, planner=planner, devices=jax.devices()[:4])(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), ours, jax.jit(step)(*args))


@pytest.mark.parametrize("planner", [DataParallel(), Zero(1), Zero(3), Megatron(data=2, tensor=2)], ids=str)
def test_the_row_is_named_where_devices_would_have_parts_of_it(planner: Any):
    parallel = autopar.parallelize(prefilled, planner=planner, cluster=CLUSTER)
    with pytest.raises(PlanningError, match=r"tokens of type int\d+\[1,16\].* leading dimension of 1\n.*\n.*batch of"):
        parallel.plan(*prompt(1))
    assert parallel.plan(*prompt(4)).inputs[parallel.plan(*prompt(4)).input_names.index("tokens")].dims[0]


def test_the_rows_of_microbatches_are_named_too():
    def step(params: Any, xs: jax.Array, ys: jax.Array) -> Any:
        def added(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(lambda t, p, q: t + p - q, total, trained(params, *part)[0], params), None

        return jax.tree.map(jnp.add, params, jax.lax.scan(added, jax.tree.map(jnp.zeros_like, params), (xs, ys))[0])

    parallel = autopar.parallelize(step, planner=DataParallel(), cluster=CLUSTER)
    params, x, y = example(6)
    with pytest.raises(PlanningError, match=r"xs of .* rows of each of 6 microbatches, which are 1\n"):
        parallel.plan(params, x[:, None], y[:, None])
    params, x, y = example(8)  # two for each device
    assert {collective.kind for collective in parallel.plan(params, x[:, None], y[:, None]).collectives} == {
        "all_reduce"
    }


@pytest.mark.parametrize("planner", [Auto(), Megatron(data=1, tensor=4), Megatron(data=1, tensor=2, pipeline=2)])
def test_a_forward_pass_of_one_row_is_jits_where_none_has_a_part(planner: Any):
    assert_equals_jit(prefilled, planner, *prompt(1))


@pytest.mark.parametrize("planner", [Auto(), Megatron(data=1, tensor=2, pipeline=2)])
def test_training_on_one_row_is_jits(planner: Any):
    assert_equals_jit(trained, planner, *example(1))


@pytest.mark.parametrize("planner", [DataParallel(), Zero(3)])
def test_one_device_has_the_row(planner: Any):
    assert autopar.parallelize(prefilled, planner=planner, cluster="1:a100-80g").plan(*prompt(1)).step_seconds > 0


def test_a_batch_that_the_user_names_is_cut_with_a_warning():
    named = autopar.parallelize(prefilled, batch_argnames="params['head']", planner=DataParallel(), cluster=CLUSTER)
    with pytest.warns(UserWarning, match="taken for the batch: params"):
        plan = named.plan(*prompt(1))
    assert plan.inputs[plan.input_names.index("params['head']")].dims[0] == ("data",)
