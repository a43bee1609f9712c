"""Sums over dimensions of which a piece has one element: the same numbers, as XLA:CPU is fast at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

import autopar


def sums(jaxpr: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The operand's shape and the axes of every sum of a program, also of the programs in it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "reduce_sum":
            yield equation.invars[0].aval.shape, equation.params["axes"]
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from sums(inner)


def emitted(planner: Any, function: Any, *arguments: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The sums of a planned program."""
    step = autopar.parallelize(function, planner=planner, cluster="8:cpu")
    return list(sums(jax.make_jaxpr(step)(*arguments).jaxpr))


@pytest.mark.parametrize("rows", [8, 16])
def test_a_sum_of_one_row_is_over_it_too(rows: int):
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(x * y, axis=-1)

    draw = np.random.default_rng(rows).normal
    x, y = (jnp.asarray(draw(size=(rows, 3, 1, 5)), "float32") for _ in range(2))
    planned = emitted(autopar.DataParallel(), step, x, y)
    assert planned == [((rows // 8, 3, 1, 5), (0, 2, 3) if rows == 8 else (2, 3))]
    ours = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:cpu")(x, y)
    assert ours.shape == (rows, 3, 1)
    np.testing.assert_allclose(ours, step(x, y), rtol=1e-6, atol=1e-6)


def test_a_sum_that_no_device_cuts_keeps_its_axes():
    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x * x, axis=-1), jnp.sum(y, axis=1)

    x, y = jnp.ones((8, 4)), jnp.ones((1, 3, 5))
    assert ((1, 3, 5), (1,)) in emitted(autopar.DataParallel(), step, x, y)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bfloat16", "float16"])
@pytest.mark.parametrize("axis", [None, (0, 1), 0, (1, 2)])
def test_sums_are_those_of_jit_in_every_dtype(dtype: str, axis: Any):
    def step(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=axis, keepdims=True)

    x = jnp.asarray(np.random.default_rng(3).integers(0, 9, (8, 1, 4)), dtype)
    ours = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:cpu")(x)
    np.testing.assert_array_equal(ours, jax.jit(step)(x))
    assert ours.dtype == step(x).dtype
