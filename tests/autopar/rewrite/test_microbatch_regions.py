"""The three regions of a step in microbatches: nodes before, in and after the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.closeness import assert_close, assert_same_bits
from tests.sample import slow


def test_a_constant_that_is_read_before_the_loop_and_after_it_is_made_in_both() -> None:
    """It was made before the loop alone, where it costs nothing and so was not kept: KeyError."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        ones = jnp.ones((w.shape[1], 2))
        scale = jnp.tanh(w @ ones)[:, 0]  # no microbatch changes it
        grad = jax.grad(lambda w: (jnp.tanh(x * scale @ w) ** 2).mean())(w)
        return w - 0.1 * grad, (w - 0.1 * grad) @ ones

    draws = np.random.default_rng(0)
    w, x = (jnp.asarray(draws.normal(size=shape), "float32") for shape in ((8, 4), (16, 8)))
    got = autopar.parallelize(step, planner=autopar.DataParallel(), microbatches=2)(w, x)
    for mine, theirs in zip(got, jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


WAYS: tuple[dict[str, Any], ...] = ({"microbatches": 2}, {"planner": autopar.DataParallel(), "microbatches": 2})


@pytest.mark.parametrize("raw", [False, slow(True)])
def test_tokens_of_rows_that_are_moved_at_random_are_counted_before_the_loop(raw: bool) -> None:
    """The count has no weights in it. What is picked by numbers that a key draws counted as the product of such."""

    def step(table: jax.Array, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(key, len(tokens) + 1)[1:]
        shifts = jax.vmap(lambda key: jax.random.randint(key, (), 0, tokens.shape[1]))(keys)
        moved = jax.vmap(jnp.roll)(tokens, shifts)
        counts = moved[:, 1:] < 7

        def loss(table: jax.Array) -> jax.Array:
            return ((table[moved[:, :-1]] ** 2).sum(-1) * counts).sum() / jnp.maximum(counts.sum(), 1)

        value, gradient = jax.value_and_grad(loss)(table)
        return table - 0.1 * gradient, value

    draws, key = np.random.default_rng(0), jax.random.PRNGKey(0) if raw else jax.random.key(0)
    with jax.enable_x64(True):
        arguments = draws.normal(size=(16, 8)), draws.integers(0, 16, (16, 12)), key
        for way in WAYS:
            got, wanted = autopar.parallelize(step, **way)(*arguments), jax.jit(step)(*arguments)
            for ours, jits in zip(got, wanted, strict=True):
                np.testing.assert_allclose(ours, jits, rtol=1e-10, atol=1e-12)


def at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    return x[jax.random.permutation(key, len(x))]


def backwards(x: jax.Array, key: jax.Array) -> jax.Array:
    return x[::-1]


def shifted(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.roll(x, 1, axis=0)


@pytest.mark.parametrize("others", [at_random, backwards, shifted])
def test_rows_that_are_mixed_with_others_are_mixed_before_the_loop(others: Callable[..., jax.Array]) -> None:
    """As rows in an order that the batch gives are: neither has weights in it. An order that is none of the batch's or
    of a key's was refused.
    """

    def step(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        both = 0.7 * x + 0.3 * others(x, key)
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(both @ w).mean())(w)

    draws = np.random.default_rng(0)
    with jax.enable_x64(True):
        arguments = draws.normal(size=(8, 4)), draws.normal(size=(16, 8)), jax.random.key(0)
        for way in WAYS:
            got = autopar.parallelize(step, **way)(*arguments)
            np.testing.assert_allclose(got, jax.jit(step)(*arguments), rtol=1e-10, atol=1e-12)


def test_the_operator_that_needs_its_whole_batch_is_named() -> None:
    """Of two halves of a batch, neither is a microbatch's."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x[:8] @ w) * (x[8:] @ w)))(w)

    with pytest.raises(
        autopar.PlanningError, match=r"needs its whole batch at once \(slice at .*test_microbatch_regions"
    ):
        autopar.parallelize(step, microbatches=2)(jnp.ones((8, 4)), jnp.ones((16, 8)))


def test_draws_that_a_recomputed_layer_makes_again_are_counted_whole() -> None:
    """In the layer's recomputation rows were masked by a microbatch's own draws, which the count reads all of."""

    def step(w: jax.Array, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        @jax.checkpoint
        def loss(w: jax.Array, key: jax.Array, x: jax.Array) -> jax.Array:
            mask = jax.random.uniform(key, x.shape[:1], x.dtype)
            return (jnp.tanh(jnp.tanh(x @ w) @ w).sum(-1) * mask).sum() / mask.sum()

        value, gradient = jax.value_and_grad(loss)(w, key, x)
        return w - 0.1 * gradient, value

    draws = np.random.default_rng(0)
    with jax.enable_x64(True):
        arguments = draws.normal(size=(8, 8)) / 3, draws.normal(size=(16, 8)), jax.random.key(0)
        for way in WAYS:
            got, wanted = autopar.parallelize(step, **way)(*arguments), jax.jit(step)(*arguments)
            for ours, jits in zip(got, wanted, strict=True):
                np.testing.assert_allclose(ours, jits, rtol=1e-10, atol=1e-12)


def test_layers_are_not_computed_before_the_loop_for_what_all_rows_have_in_common() -> None:
    """Layers in a loop, of which each adds a product of two means over the batch to the loss, as some mixtures of
    experts do: the whole loop over layers was computed up front, and the one over microbatches had nothing left to do.
    """

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(carry: Any, weight: jax.Array) -> Any:
            x, penalty = carry
            shares = jax.nn.softmax(x @ weight)
            return (x + jnp.tanh(x @ weight), penalty + (shares.mean(0) * (shares > 0.1).mean(0)).sum()), None

        def loss(weights: jax.Array) -> jax.Array:
            x_after, penalty = jax.lax.scan(layer, (x, 0.0), weights)[0]
            return jnp.mean(x_after**2) + 0.01 * penalty

        return weights - 0.1 * jax.grad(loss)(weights)

    for way in WAYS:
        with pytest.raises(autopar.PlanningError, match=r"mul at .*test_microbatch_regions.* needs as a whole"):
            autopar.parallelize(step, **way)(jnp.ones((3, 8, 8)), jnp.ones((16, 8)))


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"planner": autopar.Pipeline(stages=2, microbatches=1)}])
def test_a_key_that_a_loop_carries_beside_rows_comes_back_as_it_is(options: Any) -> None:
    """Keys have no sum, as what leaves the loop: TypeError."""

    def step(state: Any, rows: jax.Array) -> Any:
        weights, key = state

        def noisy(carry: Any, weight: jax.Array) -> Any:
            rows, key = carry
            key, now = jax.random.split(key)
            return (jnp.tanh(rows @ weight) + jax.random.normal(now, rows.shape), key), None

        def loss(weights: jax.Array) -> Any:
            (made, after), _ = jax.lax.scan(noisy, (rows, key), weights)
            return jnp.mean(made**2), after

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        return (weights - 0.1 * gradients, after), value

    draw = np.random.default_rng(0)
    state, rows = (draw.normal(size=(2, 8, 8)), jax.random.key(0)), draw.normal(size=(8, 8))
    with jax.enable_x64(True):
        parallel = autopar.parallelize(step, devices=jax.devices()[:2], **options)
        ((weights, key), loss), ((weights_of_jit, key_of_jit), loss_of_jit) = (
            parallel(state, rows),
            jax.jit(step)(state, rows),
        )
        assert_same_bits(key, key_of_jit)
        assert_close((weights, loss), (weights_of_jit, loss_of_jit))
