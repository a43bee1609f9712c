"""Loops under `vmap` end row by row: devices that share nothing else do not wait, and the step is `jax.jit`'s."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from tests.autopar.random_plans import Dice
from tests.closeness import assert_close
from tests.sample import slow

ROWS, WIDTH = 16, 8
DRAWS = np.random.default_rng(3)
PARAMS = {"in": DRAWS.normal(size=(4, WIDTH)), "again": 0.3 * DRAWS.normal(size=(WIDTH, WIDTH)), "out": np.ones(WIDTH)}
BATCH = DRAWS.normal(size=(ROWS, 4)) * np.geomspace(1e-3, 10, ROWS)[:, None]

Params = dict[str, jax.Array]


pytestmark = pytest.mark.usefixtures("float64")


def until_still(params: Params, x: jax.Array) -> jax.Array:
    """A fixed point of one row, after a number of turns of its own."""

    def moved(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z, _ = state
        new = jnp.tanh(z @ params["again"] + x)
        return new, jnp.abs(new - z).max()

    return lax.while_loop(lambda state: state[1] > 1e-9, moved, (jnp.zeros_like(x), jnp.asarray(1.0)))[0]


def halved(params: Params, x: jax.Array) -> jax.Array:
    """Of some rows nothing is done, of others much, in a loop in a loop."""

    def less(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, turns = state
        x = lax.while_loop(lambda x: jnp.abs(x).sum() > 2.0 + turns, lambda x: 0.9 * x @ params["again"], x)
        return 0.5 * x, turns + 1

    return lax.while_loop(lambda state: jnp.abs(state[0]).max() > 0.3, less, (x, 0))[0]


def none_goes_on(params: Params, x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: x.max() > 1e9, lambda x: x + params["again"].sum(), x)


def step(
    of_row: Callable[[Params, jax.Array], jax.Array], params: Params, batch: jax.Array
) -> tuple[Params, jax.Array]:
    def loss(params: Params) -> jax.Array:
        hidden = batch @ params["in"]
        rows = jax.vmap(partial(of_row, lax.stop_gradient(params)))(lax.stop_gradient(hidden))
        return jnp.sum((jnp.tanh(rows + hidden) @ params["out"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.01 * g, gradients)), value


LOOPS = (until_still, halved, none_goes_on)
PLANNERS: dict[str, dict[str, Any]] = {
    "auto": {},
    "data parallel": {"planner": autopar.DataParallel()},
    "ZeRO-3": {"planner": autopar.Zero(3)},
    "tensor": {"planner": autopar.Megatron(data=2, tensor=4)},
    "microbatches": {"planner": autopar.DataParallel(), "microbatches": 2},
    "pipeline": {"planner": autopar.GPipe(stages=2, microbatches=2)},
}


def flags(plan: autopar.Plan) -> int:
    """How often a truth value is sent in a step."""
    return sum(collective.count for collective in plan.collectives if collective.dtype == "bool")


@pytest.mark.parametrize(
    "name", ["data parallel", "microbatches", *map(slow, ("auto", "ZeRO-3", "tensor", "pipeline"))]
)
@pytest.mark.parametrize("loop", LOOPS)
def test_the_step_is_jits(loop: Callable[..., Any], name: str):
    ours = autopar.parallelize(partial(step, loop), **PLANNERS[name])
    assert_close(ours(PARAMS, BATCH), jax.jit(partial(step, loop))(PARAMS, BATCH), 1e-10)


@pytest.mark.parametrize(
    ("loop", "seed"), [(until_still, 0), (halved, 1), *(slow(f, s) for f in LOOPS for s in range(8))]
)
def test_under_a_random_plan_it_is_so_too(loop: Callable[..., Any], seed: int):
    ours = autopar.parallelize(partial(step, loop), planner=Dice(seed=seed, sizes=(2, 4)))
    ours.lower(PARAMS, BATCH).verify().check()
    assert_close(ours(PARAMS, BATCH), jax.jit(partial(step, loop))(PARAMS, BATCH), 1e-10)


def test_devices_with_rows_of_their_own_do_not_wait_for_each_other():
    for planner in (autopar.DataParallel(), autopar.Zero(3)):
        lowered = autopar.parallelize(partial(step, until_still), planner=planner).lower(PARAMS, BATCH)
        assert flags(lowered.plan) == 0
        lowered.verify().check()


def test_devices_that_share_more_run_as_long_as_any_row_does():
    """Some of these plans cut rows over an axis over which each turn sends something."""
    plans = [
        autopar.parallelize(partial(step, until_still), planner=Dice(seed=seed, sizes=(8,))).plan(PARAMS, BATCH)
        for seed in range(12)
    ]
    assert {flags(plan) > 0 for plan in plans} == {True, False}
