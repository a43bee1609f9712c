"""Batches behind time: the dimension along which inputs have their rows where loops run over the first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from passes.layers.time_first import row_dims

STEPS, ROWS, WIDTH = 6, 16, 8
RATE = 0.1


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), "float32")


PARAMS = {"in": drawn(WIDTH, WIDTH), "state": drawn(WIDTH, WIDTH), "out": drawn(WIDTH, 1)}
ROWS_IN_TIME = drawn(STEPS, ROWS, WIDTH)


def descended(loss: Any, params: Any, *data: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, *data)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


def recurrent(params: Any, x: jax.Array, lengths: jax.Array) -> Any:
    """A recurrent network that stops at the length of each row."""

    def loss(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        def cell(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            at, row = now
            state = jnp.where((at < lengths)[:, None], jnp.tanh(row @ params["in"] + state @ params["state"]), state)
            return state, state

        states = lax.scan(cell, jnp.zeros((x.shape[1], WIDTH)), (jnp.arange(len(x)), x))[1]
        return jnp.mean((states @ params["out"]) ** 2)

    return descended(loss, params, x, lengths)


def returns(params: Any, x: jax.Array, rewards: jax.Array) -> Any:
    """Values beside returns, which a loop adds up from the last step on of what differences of slices are."""

    def loss(params: Any, x: jax.Array, rewards: jax.Array) -> jax.Array:
        values = (jnp.tanh(x @ params["in"] @ params["state"]) @ params["out"])[..., 0]
        deltas = rewards[:-1] + 0.9 * lax.stop_gradient(values[1:]) - lax.stop_gradient(values[:-1])
        sums = lax.scan(lambda total, delta: (delta + 0.9 * total,) * 2, jnp.zeros(x.shape[1]), deltas, reverse=True)[1]
        hidden = jnp.tanh(x[:-1] @ params["in"] @ params["state"])
        return jnp.mean(((hidden @ params["out"])[..., 0] - sums) ** 2)

    return descended(loss, params, x, rewards)


def batch_first(params: Any, x: jax.Array, lengths: jax.Array) -> Any:
    return recurrent(params, x.swapaxes(0, 1), lengths)


def epochs(params: Any, x: jax.Array, rewards: jax.Array) -> Any:
    """Several updates in a loop, each from all of the batch."""
    return lax.scan(lambda params, _: returns(params, x, rewards), params, None, length=2)


def attention(params: Any, x: jax.Array, rewards: jax.Array) -> Any:
    """A transformer of sequences behind time, as PyTorch's are: each position attends to those before it."""

    def loss(params: Any, x: jax.Array, rewards: jax.Array) -> jax.Array:
        for _ in range(2):
            weights = jax.nn.softmax(jnp.einsum("tbd,sbd->bts", x @ params["in"], x @ params["state"]) / STEPS)
            x = x + jnp.einsum("bts,sbd->tbd", weights, x)
        return jnp.mean(((x @ params["out"])[..., 0] - rewards) ** 2)

    return descended(loss, params, x, rewards)


def attention_batch_first(params: Any, x: jax.Array, rewards: jax.Array) -> Any:
    return attention(params, x.swapaxes(0, 1), rewards.swapaxes(0, 1))


def attention_of_examples(params: Any, x: jax.Array, rewards: jax.Array) -> Any:
    """Each row attends to the others of the batch, as those of a table do: no dimension behind them is cut instead."""

    def loss(params: Any, x: jax.Array, rewards: jax.Array) -> jax.Array:
        rows = x.reshape(len(x), -1) @ jnp.tile(params["in"], (ROWS, 1))
        mixed = jax.nn.softmax(rows @ rows.T) @ jnp.tanh(rows @ params["state"])
        return jnp.mean((mixed @ params["out"] - rewards) ** 2)

    return descended(loss, params, x, rewards)


CASES = {
    "recurrent": (recurrent, (ROWS_IN_TIME, jnp.arange(ROWS) % STEPS), (1, 0)),
    "returns": (returns, (ROWS_IN_TIME, drawn(STEPS, ROWS)), (1, 1)),
    "epochs": (epochs, (ROWS_IN_TIME, drawn(STEPS, ROWS)), (1, 1)),
    "attention": (attention, (ROWS_IN_TIME, drawn(STEPS, ROWS)), (1, 1)),
    "attention, batch first": (attention_batch_first, (drawn(ROWS, STEPS, WIDTH), drawn(ROWS, STEPS)), (0, 0)),
    "attention of time, both even": (attention, (drawn(ROWS, ROWS, WIDTH), drawn(ROWS, ROWS)), (1, 1)),
    "batch first": (batch_first, (ROWS_IN_TIME.swapaxes(0, 1), jnp.arange(ROWS) % STEPS), (0, 0)),
}


@pytest.mark.parametrize(
    "planner", [autopar.DataParallel(), autopar.Zero(3), autopar.Megatron(data=4, tensor=2)], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_rows_behind_time_are_cut(case: str, planner: Any) -> None:
    """They were brought to every device: what leads was cut, and the loop takes all of it, one step after another."""
    step, data, dims = CASES[case]
    parallel = autopar.parallelize(step, planner=planner)
    plan = parallel.plan(PARAMS, *data)
    specs = plan.inputs[-len(data) :]
    assert [[d for d, axes in enumerate(spec.dims) if "data" in axes] for spec in specs] == [[dim] for dim in dims]
    largest = max(p.nbytes for p in PARAMS.values())
    moves = [c for c in plan.collectives if c.kind in ("all_gather", "all_to_all", "permute")]
    sent = [c for c in moves if c.nbytes > largest and c.axes == ("data",)]
    assert not sent, [str(c) for c in sent]
    for made, expected in zip(
        jax.tree.leaves(parallel(PARAMS, *data)), jax.tree.leaves(jax.jit(step)(PARAMS, *data)), strict=True
    ):
        np.testing.assert_allclose(made, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_rows_behind_time_are_seen(case: str) -> None:
    step, data, dims = CASES[case]
    traced = autopar.parallelize(step).step(PARAMS, *data)
    others = tuple(range(len(PARAMS), len(traced.graph.inputs)))
    assert row_dims(traced.graph, traced.batch, others) == (dict(zip(others, dims, strict=True)) if any(dims) else {})


def test_rows_that_attend_to_each_other_stay_first() -> None:
    traced = autopar.parallelize(attention_of_examples).step(PARAMS, drawn(ROWS, ROWS, WIDTH), drawn(ROWS, 1))
    others = tuple(range(len(PARAMS), len(traced.graph.inputs)))
    assert row_dims(traced.graph, traced.batch, others) == {}


def test_features_behind_rows_that_a_loop_takes_in_turn_are_none() -> None:
    """Weights that grow by outer products of one row after the other keep features, and sum them up elsewhere."""

    def step(weight: jax.Array, rows: jax.Array) -> jax.Array:
        def learn(weight: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return weight + RATE * jnp.outer(row, row @ weight), None

        return lax.scan(learn, weight, rows)[0]

    traced = autopar.parallelize(step).step(PARAMS["in"], drawn(STEPS, WIDTH))
    assert row_dims(traced.graph, traced.batch) == {}


def test_state_that_has_the_rows_is_cut_as_they_are() -> None:
    """What a recurrent network hands on to the next part of its sequences."""

    def step(params: Any, state: jax.Array, x: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            def cell(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
                state = jnp.tanh(row @ params["in"] + state @ params["state"])
                return state, state

            last, states = lax.scan(cell, state, x)
            return jnp.sum((states @ params["out"]) ** 2), last

        grads, last = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), last

    given = PARAMS, drawn(ROWS, WIDTH), ROWS_IN_TIME
    parallel = autopar.parallelize(step, planner=autopar.DataParallel())
    plan = parallel.plan(*given)
    assert [spec.dims for spec in plan.inputs[-2:]] == [(("data",), ()), ((), ("data",), ())]
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}
    for made, expected in zip(jax.tree.leaves(parallel(*given)), jax.tree.leaves(jax.jit(step)(*given)), strict=True):
        np.testing.assert_allclose(made, expected, rtol=2e-5, atol=1e-6)


def test_rows_behind_time_that_devices_do_not_divide_are_said() -> None:
    with pytest.raises(autopar.PlanningError, match="do not divide its dimension 1, behind time, of 12"):
        autopar.parallelize(returns, planner=autopar.DataParallel()).plan(
            PARAMS, drawn(STEPS, 12, WIDTH), drawn(STEPS, 12)
        )
