"""A loss that a loop adds up part by part of all tokens: each device has its share of every part."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from passes.sharding import ShardingSpec
from tests.sample import each

ROWS_AND_PARTS = [(8, 8), (8, 16), (16, 8)]
"""Parts of whole rows, and of less than one."""
PLANNERS = (autopar.DataParallel(), autopar.Zero(1))


def arguments(rows: int, tokens: int, width: int, vocabulary: int) -> tuple[Any, ...]:
    draw, labels = jax.random.normal, jnp.arange(rows * tokens).reshape(rows, tokens) % vocabulary
    params = {"w": draw(jax.random.key(0), (width, width)), "head": draw(jax.random.key(1), (width, vocabulary))}
    return params, draw(jax.random.key(2), (rows, tokens, width)), labels


def step(parts: int, params: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        hidden = jnp.tanh(x @ p["w"])

        @jax.checkpoint
        def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            scores = jax.nn.log_softmax(part[0] @ p["head"])
            return total - jnp.take_along_axis(scores, part[1][:, None], 1).sum(), None

        cut = hidden.reshape(parts, -1, x.shape[-1]), y.reshape(parts, -1)
        return jax.lax.scan(add, jnp.zeros(()), cut)[0]

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradients), value


@pytest.mark.parametrize(("rows_and_parts", "planner"), each(ROWS_AND_PARTS, PLANNERS))
def test_no_device_computes_all_of_a_part(rows_and_parts: tuple[int, int], planner: Any):
    rows, parts = rows_and_parts
    parallel = autopar.parallelize(partial(step, parts), planner=planner, cluster="8:a100-80g")
    plan = parallel.plan(*jax.eval_shape(lambda: arguments(rows, 1024, 512, 8192)))
    products = list(_products(plan.operators))
    assert len(products) >= 5
    assert all(any(spec.dims) or spec.partial for spec in products)


@pytest.mark.parametrize(("rows_and_parts", "planner"), each(ROWS_AND_PARTS, PLANNERS))
def test_the_step_is_jits(rows_and_parts: tuple[int, int], planner: Any):
    rows, parts = rows_and_parts
    args = arguments(rows, 16, 16, 32)
    compiled = autopar.parallelize(partial(step, parts), planner=planner).lower(*args).compile()
    compiled.verify().check()
    expected = jax.jit(partial(step, parts))(*args)
    for ours, theirs in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def _products(operators: Any) -> Any:
    """The specs of what products make, those in loops included."""
    for operator in operators:
        if operator.primitive == "dot_general":
            spec: ShardingSpec = operator.placement.results[0]
            yield spec
        for body in operator.bodies:
            yield from _products(body)
