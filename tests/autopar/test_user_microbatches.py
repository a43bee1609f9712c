"""Gradients of microbatches that the user adds up in a loop: rows of each are cut, and one reduction is behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

COUNT, ROWS, WIDTH = 4, 16, 32


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def step(params: Any, xs: jax.Array, ys: jax.Array) -> tuple[Any, jax.Array]:
    def added(total: Any, microbatch: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, *microbatch)
        return jax.tree.map(jnp.add, total, gradients), value

    gradients, values = jax.lax.scan(added, jax.tree.map(jnp.zeros_like, params), (xs, ys))
    return jax.tree.map(lambda p, g: p - 1e-4 * g, params, gradients), values.sum()


def drawn() -> tuple[Any, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    params = {"up": draw.normal(size=(WIDTH, 2 * WIDTH)), "down": draw.normal(size=(2 * WIDTH, WIDTH))}
    return params, draw.normal(size=(COUNT, ROWS, WIDTH)), draw.normal(size=(COUNT, ROWS, WIDTH))


@pytest.mark.parametrize(
    "planner", [autopar.DataParallel(), autopar.Zero(3), autopar.Megatron(data=2, tensor=4), autopar.Auto()]
)
def test_the_step_is_jits(planner: Any):
    with jax.enable_x64():
        args = drawn()
        compiled = autopar.parallelize(step, planner=planner).lower(*args).compile()
        compiled.verify().check()
        ours, theirs = compiled(*args), jax.jit(step)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours, theirs)


def test_rows_are_cut_and_gradients_reduced_once():
    plan = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(*drawn())
    specs = {name: str(spec) for name, spec in zip(plan.input_names, plan.inputs, strict=True)}
    assert (specs["xs"], specs["ys"]) == ("[-, data, -]", "[-, data, -]")
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    weights = [c for c in plan.collectives if c.nbytes > 8]
    assert sum(c.count for c in weights) == 2


def test_rows_are_cut_where_all_of_them_are_looked_at_beside_the_loop():
    def averaged(params: Any, xs: jax.Array, ys: jax.Array) -> Any:
        updated, value = step(params, xs, ys)
        return updated, value / jnp.abs(ys).sum()

    plan = autopar.parallelize(averaged, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(*drawn())
    assert [str(spec) for spec in plan.inputs[-2:]] == ["[-, data, -]"] * 2
    assert {c.kind for c in plan.collectives} == {"all_reduce"}


@pytest.mark.parametrize("is_loop", [False, True])
def test_rows_of_few_groups_are_cut_inside_each(is_loop: bool):
    """Groups that are picked one by one were computed whole on all devices, as these did not divide their number."""

    def picked(params: Any, x: jax.Array, y: jax.Array) -> Any:
        xs, ys = (a.reshape(COUNT, -1, a.shape[-1]) for a in (x, y))

        def added(i: Any, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, xs[i], ys[i]))

        total = jax.tree.map(jnp.zeros_like, params)
        if is_loop:
            total = jax.lax.fori_loop(0, COUNT, added, total)
        for i in range(0 if is_loop else COUNT):
            total = added(i, total)
        return jax.tree.map(lambda p, g: p - 1e-4 * g, params, total)

    with jax.enable_x64():
        params, xs, ys = drawn()
        rows = xs.reshape(-1, WIDTH), ys.reshape(-1, WIDTH)
        parallel = autopar.parallelize(picked, planner=autopar.DataParallel())
        ours, theirs = parallel(params, *rows), jax.jit(picked)(params, *rows)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours, theirs)
    params = {"up": jax.ShapeDtypeStruct((64, 8192), "float32"), "down": jax.ShapeDtypeStruct((8192, 64), "float32")}
    x = jax.ShapeDtypeStruct((8192, 64), "float32")
    plan = autopar.parallelize(picked, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(params, x, x)
    assert sum(c.nbytes * c.count for c in plan.collectives if c.kind == "all_reduce") == 2 * 64 * 8192 * 4


def test_an_uneven_microbatch_is_named():
    params, xs, ys = drawn()
    parallel = autopar.parallelize(step, planner=autopar.DataParallel())
    with pytest.raises(autopar.PlanningError, match="rows of each of 4 microbatches, which are 12"):
        parallel.plan(params, xs[:, :12], ys[:, :12])
