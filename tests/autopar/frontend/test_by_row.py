"""One element a row, however it is indexed: it is seen that no row needs another, and the values are JAX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from tests.sample import half, slow

ROWS, LENGTH, WIDTH = 16, 5, 8
DRAW = np.random.default_rng(0)
WEIGHTS = jnp.asarray(0.3 * DRAW.normal(size=(WIDTH, WIDTH)), "float32")
BATCH = jnp.asarray(DRAW.normal(size=(ROWS, LENGTH, WIDTH)), "float32")
CHOSEN = jnp.asarray(DRAW.integers(-LENGTH, LENGTH, ROWS), "int32")
EACH = jnp.asarray(DRAW.integers(0, WIDTH, (ROWS, LENGTH)), "int32")

Taken = Callable[[jax.Array], jax.Array]

TAKEN: dict[str, Taken] = {
    "a vector a row": lambda h: h[jnp.arange(ROWS), CHOSEN],
    "of an array that is known": lambda h: h[np.arange(ROWS), CHOSEN],
    "a number a row": lambda h: h[jnp.arange(ROWS), CHOSEN, CHOSEN + 1],
    "a number a row and place": lambda h: h[jnp.arange(ROWS)[:, None], jnp.arange(LENGTH)[None], EACH],
    "narrow numbers": lambda h: h[jnp.arange(ROWS, dtype="int8"), CHOSEN],
    "rows last": lambda h: h.swapaxes(0, 1)[CHOSEN, jnp.arange(ROWS)],
    "the diagonal": lambda h: h[jnp.arange(LENGTH), jnp.arange(LENGTH)],
    "set": lambda h: h.at[jnp.arange(ROWS), CHOSEN].set(0.5),
    "added": lambda h: h.at[jnp.arange(ROWS), CHOSEN].add(h[:, 0]),
    "the larger": lambda h: h.at[jnp.arange(ROWS), CHOSEN].max(h[:, 0]),
}

SHARED: dict[str, Taken] = {
    "backwards": lambda h: h[jnp.arange(ROWS)[::-1], CHOSEN],
    "every other": lambda h: h[2 * jnp.arange(ROWS // 2), CHOSEN[: ROWS // 2]],
    "some rows": lambda h: h[jnp.arange(ROWS // 2), CHOSEN[: ROWS // 2]],
    "permuted": lambda h: h[jnp.asarray(DRAW.permutation(ROWS)), CHOSEN],
}
"""What needs other rows."""


def step_of(taken: Taken) -> Callable[..., Any]:
    def step(weights: jax.Array, batch: jax.Array) -> Any:
        def loss(weights: jax.Array) -> jax.Array:
            return jnp.sum(taken(jnp.tanh(batch @ weights)) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.01 * gradient, value

    return step


def indexed(taken: Taken) -> list[Any]:
    """The dimension numbers of the gathers and scatters of a step."""
    traced = autopar.parallelize(step_of(taken)).trace(WEIGHTS, BATCH)
    return [
        e.params["dimension_numbers"] for e in traced.equations if e.primitive.name.startswith(("gather", "scatter"))
    ]


@pytest.mark.parametrize("name", TAKEN)
def test_rows_lie_side_by_side(name: str) -> None:
    found = indexed(TAKEN[name])
    assert found
    assert all(numbers.operand_batching_dims for numbers in found)


@pytest.mark.parametrize("name", SHARED)
def test_other_rows_are_still_looked_up(name: str) -> None:
    found = indexed(SHARED[name])
    assert found
    assert not any(numbers.operand_batching_dims for numbers in found)


@pytest.mark.parametrize(("name", "planner"), half([*TAKEN, *SHARED], [autopar.DataParallel(), autopar.Auto()]))
def test_values_are_jaxs(name: str, planner: Any) -> None:
    step = step_of({**TAKEN, **SHARED}[name])
    got, expected = autopar.parallelize(step, planner=planner)(WEIGHTS, BATCH), jax.jit(step)(WEIGHTS, BATCH)
    for ours, jits in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, jits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [slow("a vector a row"), "a number a row and place", "added"])
def test_a_batch_of_it_is_taken_in_parts(name: str) -> None:
    def step(weights: jax.Array, batch: jax.Array, chosen: jax.Array, each: jax.Array) -> Any:
        rows = jnp.arange(len(batch))

        def loss(weights: jax.Array) -> jax.Array:
            hidden = jnp.tanh(batch @ weights)
            taken = {
                "a vector a row": lambda: hidden[rows, chosen],
                "a number a row and place": lambda: hidden[rows[:, None], jnp.arange(LENGTH)[None], each],
                "added": lambda: hidden.at[rows, chosen].add(hidden[:, 0]),
            }
            return jnp.sum(jnp.exp(taken[name]()) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.01 * gradient, value

    arguments = WEIGHTS, BATCH, CHOSEN, EACH
    got = autopar.parallelize(step, microbatches=4)(*arguments)
    for ours, jits in zip(got, jax.jit(step)(*arguments), strict=True):
        np.testing.assert_allclose(ours, jits, rtol=1e-5, atol=1e-5)


def test_no_rows_are_gathered_under_data_parallelism() -> None:
    plan = autopar.parallelize(step_of(TAKEN["a vector a row"]), planner=autopar.DataParallel()).plan(WEIGHTS, BATCH)
    assert {(c.kind, c.nbytes) for c in plan.collectives} == {("all_reduce", WEIGHTS.nbytes + 4)}


ALL_AT_ONE: dict[str, Taken] = {
    "added to the first": lambda h: jnp.zeros((ROWS, WIDTH)).at[jnp.zeros(ROWS, int)].add(h[:, 0]),
    "a table that is read at its first row": lambda h: jax.grad(
        lambda table: (table[jnp.zeros(ROWS, int)] * h[:, 0]).sum()
    )(h[:, 1]),
    "a segment": lambda h: jax.ops.segment_sum(h[:, 0], jnp.zeros(ROWS, int), ROWS),
    "counted in eight bits": lambda h: jnp.repeat(h[:, 0], 20, 0)[lax.iota("uint8", 20 * ROWS), jnp.tile(CHOSEN, 20)],
}


@pytest.mark.parametrize("name", ALL_AT_ONE)
def test_rows_that_are_read_or_written_by_several_are_not_rows_of_their_own(name: str):
    ours, theirs = autopar.parallelize(ALL_AT_ONE[name])(BATCH), jax.jit(ALL_AT_ONE[name])(BATCH)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
