"""State is what the next call takes, in whatever wrapping it comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.frontend.tracing import trace

OPTIMIZER = optax.adam(1e-3)
PARAMS = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 16))}
STATE = PARAMS, OPTIMIZER.init(PARAMS)
BATCH = jnp.ones((8, 16))


def updated(params: Any, moments: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, value


def in_pieces(state: Any, x: jax.Array) -> Any:
    return updated(*state, x)


def with_the_loss(state: Any, x: jax.Array) -> Any:
    params, moments, value = updated(state["params"], state["moments"], x)
    return {"params": params, "moments": moments, "loss": value}


def with_a_wider_scale(state: Any, x: jax.Array) -> Any:
    params, moments, value = updated(*state[:2], x)
    return (params, moments, state[2].astype(jnp.float32) + value), value


def reconstructed(params: Any, batch: dict[str, Any]) -> Any:
    """Its results have the types of some of the batch, which no gradient has changed."""
    return {"image": jnp.tanh(batch["image"] @ params["a"]) @ params["b"], "label": batch["image"].argmax(-1)}, params


def paired(step: Callable[..., Any], *arguments: Any, **options: Any) -> list[tuple[str, str]]:
    """(result, argument) of each leaf of state."""
    traced = trace(step, arguments, {}, **options)
    graph = traced.graph
    return [(graph.output_names[o], graph.input_names[i]) for o, i in traced.state_pairs]


def test_pieces_are_paired_one_by_one():
    pairs = paired(in_pieces, STATE, BATCH)
    assert len(pairs) == len(jax.tree.leaves(STATE))
    assert all(result.removeprefix("out") == argument.removeprefix("state") for result, argument in pairs)


def test_a_result_may_have_more_than_the_state():
    state = dict(zip(("params", "moments"), STATE, strict=True))
    pairs = paired(with_the_loss, state, BATCH)
    assert len(pairs) == len(jax.tree.leaves(STATE))
    assert all(result.removeprefix("out") == argument.removeprefix("state") for result, argument in pairs)


def test_leaves_beside_one_of_another_type_are_paired():
    pairs = paired(with_a_wider_scale, (*STATE, jnp.ones((), jnp.float16)), BATCH)
    assert len(pairs) == len(jax.tree.leaves(STATE))
    assert all(result.removeprefix("out[0]") == argument.removeprefix("state") for result, argument in pairs)


def test_lone_arrays_in_pieces_are_paired_if_they_are_donated():
    def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight, momentum = state
        momentum = 0.9 * momentum + jax.grad(lambda weight: jnp.mean(jnp.tanh(x @ weight) ** 2))(weight)
        return weight - 0.1 * momentum, momentum

    def swapped(state: tuple[jax.Array, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        weight, momentum = step(state, x)
        return {"weight": weight, "momentum of it": momentum, "norm": momentum.sum()}

    state = jnp.ones((16, 16)), jnp.zeros((16, 16))
    assert not paired(swapped, state, BATCH)
    assert len(paired(swapped, state, BATCH, donate_argnums=0)) == 2
    assert paired(step, state, BATCH) == [("out[0]", "state[0]"), ("out[1]", "state[1]")]


def test_a_batch_is_no_state_where_results_look_like_some_of_it():
    batch = {"image": BATCH, "label": jnp.zeros(8, jnp.int32), "weight": jnp.ones(8)}
    assert {argument for _, argument in paired(reconstructed, PARAMS, batch)} == {"params['a']", "params['b']"}


def test_a_batch_is_no_state_where_new_weights_make_a_result_of_it():
    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        gradients = jax.grad(lambda params: jnp.mean(jnp.tanh(x @ params["a"] @ params["b"]) ** 2))(params)
        params = jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients)
        return params, jax.lax.fori_loop(0, 3, lambda i, x: x + jnp.tanh(x @ params["a"]) @ params["b"], x)

    assert {argument for _, argument in paired(step, PARAMS, BATCH)} == {"params['a']", "params['b']"}
    plan = autopar.parallelize(step, planner=autopar.DataParallel()).plan(PARAMS, BATCH)
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}


def test_a_lone_average_of_weights_is_state():
    def step(weight: jax.Array, average: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = weight - 0.1 * jax.grad(lambda weight: jnp.mean(jnp.tanh(x @ weight) ** 2))(weight)
        return weight, 0.9 * average + 0.1 * weight

    pairs = paired(step, jnp.ones((16, 16)), jnp.ones((16, 16)), BATCH)
    assert pairs == [("out[0]", "weight"), ("out[1]", "average")]


@pytest.mark.parametrize("step", [in_pieces, with_a_wider_scale])
def test_zero_cuts_state_that_comes_back_in_another_wrapping(step: Callable[..., Any]):
    state = STATE if step is in_pieces else (*STATE, jnp.ones((), jnp.float16))
    wrapped = autopar.parallelize(step, planner=autopar.Zero(3), donate_argnums=0)
    plan = wrapped.plan(state, BATCH)
    assert plan.nbytes["parameters"] == sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS)) / 8
    results, expected = wrapped(jax.tree.map(jnp.array, state), BATCH), jax.jit(step)(state, BATCH)
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
