"""Values that are one number throughout: computed when a function is traced, as XLA would, and moved nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from tests.autopar.random_plans import Dice
from tests.autopar.test_stress import CASES

X = jnp.arange(32.0).reshape(8, 4)


def primitives(function: Callable[..., Any], *args: Any) -> list[str]:
    return [node.primitive for node in autopar.parallelize(function).step(*args).graph.nodes]


@pytest.mark.parametrize(
    "made",
    [
        lambda x: jnp.float32(1) / 3,
        lambda x: -jnp.full(x.shape, jnp.float32(1) / 128),
        lambda x: jnp.bfloat16(1) / 3 * jnp.ones(x.shape, jnp.bfloat16),
        lambda x: jnp.sqrt(jnp.full(x.shape, 2.0)) - 1,
        lambda x: jnp.where(jnp.zeros(x.shape) > 1, 1.0, jnp.float32(2) * 3).T[:2].reshape(-1)[0],
        lambda x: (jnp.int32(7) + jnp.full(x.shape, 2**31 - 1, jnp.int32)).astype(jnp.int8),
        lambda x: jax.lax.dynamic_slice(jnp.full(x.shape, True), (0, 0), (1, 1)),
    ],
    ids=["quotient", "filled", "bfloat16", "root", "views", "wraps", "truth"],
)
def test_values_of_one_known_number_are_that_number_and_equal_to_jit(made: Callable[[jax.Array], jax.Array]):
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return made(x), x + 1

    assert set(primitives(both, X)) <= {"broadcast_in_dim", "add"}
    for mine, theirs in zip(autopar.parallelize(both)(X), jax.jit(both)(X), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: jnp.exp(jnp.full(x.shape, 2.0)),
        lambda x: jax.lax.div(jnp.full(x.shape, -7), 2),
        lambda x: jnp.full(x.shape, 1e30) * 1e30,
        lambda x: jnp.full(x.shape, 1e-30) * 1e-10,
        lambda x: jnp.full(x.shape, 3e9).astype(jnp.int32),
        lambda x: jax.lax.iota(jnp.float32, 8) * 2,
    ],
    ids=["no right result", "rounds otherwise", "infinite", "flushed to zero", "does not fit", "no one number"],
)
def test_numbers_that_devices_may_round_otherwise_are_computed_there(made: Callable[[jax.Array], jax.Array]):
    assert set(primitives(made, X)) - {"broadcast_in_dim", "iota"}
    np.testing.assert_allclose(autopar.parallelize(made)(X), jax.jit(made)(X))


def test_all_that_there_is_is_taken_in_another_shape():
    def step(x: jax.Array, one: jax.Array) -> Any:
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(jnp.take(x, 0, -1))), argnums=0)(one), jnp.take(x, 0, -1)

    one = X[:, :1]
    named = primitives(step, X, one)
    assert named.count("gather") == 1  # of one column of several
    assert not any(name.startswith("scatter") for name in named)
    for mine, theirs in zip(
        *map(jax.tree.leaves, (autopar.parallelize(step)(X, one), jax.jit(step)(X, one))), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("seed", [455583341, 455583342])
def test_no_plan_gathers_what_is_one_number(seed: int):
    """Plans sent the gradient of a mean, and what it is scattered to, which XLA made of no message."""
    function, args = CASES["embedding and its gradient"]
    step = autopar.parallelize(function, planner=Dice(seed=seed, sizes=(4, 2)))
    compiled = step.lower(*args).compile(dict(UNCOMBINED))
    verify(compiled.plan, compiled.as_text()).check()


def test_arrays_of_one_number_are_sent_once():
    """Each call made its own zeros and ones, so that a count of edges was planned once a layer; XLA sends one."""

    def step(x: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
        for _ in range(2):
            sums, counts = (jax.ops.segment_sum(y, targets, len(x)) for y in (x[sources], jnp.ones(len(targets))))
            x = x + jnp.tanh(sums / (1 + counts[:, None]))
        return x

    edges = jnp.arange(16) % 8, jnp.arange(16) // 2
    step_in_parts = autopar.parallelize(step, planner=autopar.DataParallel(), devices=jax.devices()[:4])
    verified = step_in_parts.lower(X, *edges).verify()
    verified.check()
    (counts,) = (row for row in verified.rows if row.kind == "reduce_scatter" and row.nbytes == 2 * 4)
    assert (counts.planned, counts.compiled) == (1, 1)


@pytest.mark.parametrize("which", [2, -1])
def test_a_choice_beyond_all_cases_ends_nothing(which: int):
    def chosen(x: jax.Array) -> jax.Array:
        return x + jax.lax.select_n(jnp.full(X.shape, which, jnp.int32), jnp.zeros(X.shape), jnp.ones(X.shape))

    assert jnp.array_equal(autopar.parallelize(chosen)(X), jax.jit(chosen)(X))
