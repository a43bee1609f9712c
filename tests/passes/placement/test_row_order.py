"""The order of a batch's rows does not matter where each is computed by itself, or reduced with all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend.tracing import trace
from passes.placement.row_order import rows_in_any_order

ROWS, WIDTH = 32, 4
WEIGHT = np.random.default_rng(0).normal(size=(WIDTH, WIDTH))
TABLE = np.random.default_rng(1).normal(size=(9, WIDTH))


def until_small(x: Any) -> Any:
    """A loop whose test is made of all rows."""
    return jax.lax.while_loop(lambda y: jnp.mean(y**2) > 1e-2, lambda y: jnp.tanh(y @ WEIGHT) / 2, x)


ANY_ORDER: dict[str, Callable[[Any], Any]] = {
    "each by itself": lambda x: jnp.tanh(x @ WEIGHT + 1.0),
    "a sum": lambda x: (x @ WEIGHT).sum(0),
    "the largest": lambda x: x.max(0),
    "a variance": lambda x: x.var(),
    "as many zeros": lambda x: jnp.where(x > 0, x, jnp.zeros_like(x)).sum(),
    "products of rows": lambda x: x.T @ x,
    "a lookup of each": lambda x: jnp.asarray(TABLE)[jnp.argmax(x, 1)],
    "until all are small": until_small,
    "along features": lambda x: jnp.cumsum(x, 1)[:, ::-1],
    "a branch": lambda x: jax.lax.cond(x.sum() > 0, lambda x: x, lambda x: -x, x),
    "time in a loop": lambda x: jax.lax.scan(lambda h, c: (jnp.tanh(h + c), h), jnp.zeros(ROWS), x.T)[1],
}

IN_ORDER: dict[str, Callable[[Any], Any]] = {
    "positions": lambda x: x * jnp.arange(ROWS)[:, None],
    "noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "the first": lambda x: x[0],
    "a part": lambda x: x[: ROWS // 2].sum(),
    "some of them": lambda x: x[jnp.array([3, 1])],
    "written": lambda x: x.at[3].set(0.0).sum(0),
    "turned round": lambda x: x[::-1],
    "their sums so far": lambda x: jnp.cumsum(x, 0),
    "sorted": lambda x: jnp.sort(x, 0),
    "pairs": lambda x: (x @ x.T) @ jnp.arange(float(ROWS)),
    "the largest's place": lambda x: jnp.argmax(x, 0),
    "one after the other": lambda x: jax.lax.scan(lambda h, r: (jnp.tanh(h + r), None), jnp.zeros(WIDTH), x)[0],
    "counted in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + jnp.arange(ROWS), jnp.zeros(ROWS, int)) @ x,
    "joined with features": lambda x: x.reshape(-1) * jnp.arange(ROWS * WIDTH),
}


def rows_of(function: Callable[[Any], Any]) -> Any:
    graph = trace(function, (jax.ShapeDtypeStruct((ROWS, WIDTH), "float64"),), {}).graph
    return graph, rows_in_any_order(graph, {graph.inputs[0]: 0}, ROWS)


@pytest.mark.parametrize("case", ANY_ORDER)
def test_results_in_another_order_are_the_results(case: str):
    function = ANY_ORDER[case]
    x = np.random.default_rng(2).normal(size=(ROWS, WIDTH))
    order = np.random.default_rng(3).permutation(ROWS)
    with jax.enable_x64(True):
        graph, rows = rows_of(function)
        assert rows is not None
        ours, expected = np.asarray(function(x[order])), np.asarray(function(x))
        dim = rows.get(graph.outputs[0])
        np.testing.assert_allclose(ours, expected if dim is None else expected.take(order, dim), atol=1e-12)


@pytest.mark.parametrize("case", IN_ORDER)
def test_steps_that_need_the_order_of_rows_are_recognised(case: str):
    with jax.enable_x64(True):
        assert rows_of(IN_ORDER[case])[1] is None


def searched(weight: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    """A step of the largest length, of some in turn, at which the loss of the whole batch falls."""

    def losses(weight: jax.Array) -> jax.Array:
        return ((jnp.tanh(x @ weight) - y) ** 2).sum(1)

    value, gradient = jax.value_and_grad(lambda w: losses(w).mean())(weight)

    def shorter(length: jax.Array) -> jax.Array:
        return length / 2

    def is_too_long(length: jax.Array) -> jax.Array:
        return losses(weight - length * gradient).mean() > value - 0.1 * length * (gradient**2).sum()

    length = jax.lax.while_loop(is_too_long, shorter, jnp.asarray(64.0, weight.dtype))
    return weight - length * gradient, value


def test_a_line_search_behind_microbatches_gathers_no_rows():
    draw = np.random.default_rng(4)
    with jax.enable_x64(True):
        given = draw.normal(size=(WIDTH, WIDTH)), draw.normal(size=(ROWS, WIDTH)), draw.normal(size=(ROWS, WIDTH))
        parallel = autopar.parallelize(searched, planner=autopar.DataParallel(), microbatches=2)
        assert {c.kind for c in parallel.plan(*given).collectives} == {"all_reduce"}
        for ours, theirs in zip(parallel(*given), jax.jit(searched)(*given), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10)
