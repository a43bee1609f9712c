"""Microbatches of batches that come behind time, [time, rows, ...]: rollouts, and sequences of recurrent networks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.frontend import trace
from autopar.rewrite.rows_first import with_rows_first
from passes.transforms.turns import in_turn
from tests.closeness import assert_close
from tests.sample import each

TIME, ROWS, WIDTH = 6, 16, 4
DRAWS = np.random.default_rng(0)
Params = dict[str, jax.Array]
WEIGHTS = {"in": DRAWS.normal(size=(WIDTH, WIDTH)), "value": DRAWS.normal(size=(WIDTH, 1))}
ROLLOUT = {
    "seen": DRAWS.normal(size=(TIME, ROWS, WIDTH)),
    "reward": DRAWS.normal(size=(TIME, ROWS)),
    "last": DRAWS.normal(size=(ROWS, WIDTH)),
}
PLANNERS = [autopar.Auto(), autopar.DataParallel(), autopar.Zero(3)]


def values(p: Params, seen: jax.Array) -> jax.Array:
    return (jnp.tanh(seen @ p["in"]) @ p["value"])[..., 0]


def rollouts(p: Params, b: dict[str, jax.Array]) -> Any:
    """Returns of a rollout (Schulman et al. 2016) are made backward in time, of values that the parameters have."""

    def returned(after: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        reward, value = now
        after = reward + 0.9 * (0.1 * value + 0.9 * after)
        return after, after

    _, targets = lax.scan(returned, values(p, b["last"]), (b["reward"], values(p, b["seen"])), reverse=True)
    loss, g = jax.value_and_grad(lambda p: jnp.mean((values(p, b["seen"]) - targets) ** 2))(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), loss, targets


def recurrent(state: tuple[Params, jax.Array], b: dict[str, jax.Array]) -> Any:
    """A recurrent network that goes on with the rows' states where the batch before ended."""
    p, begin = state

    def loss(p: Params) -> tuple[jax.Array, jax.Array]:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ p["in"] + x)
            return h, h

        end, h = lax.scan(cell, begin, b["seen"][:-1])
        return jnp.mean(((h @ p["value"])[..., 0] - b["reward"][1:]) ** 2), end

    (value, end), g = jax.value_and_grad(loss, has_aux=True)(p)
    return (jax.tree.map(lambda p, g: p - 0.1 * g, p, g), end), value


STEPS = {"rollouts": (rollouts, WEIGHTS), "recurrent": (recurrent, (WEIGHTS, np.zeros((ROWS, WIDTH))))}


@pytest.mark.parametrize(("name", "planner"), each(STEPS, PLANNERS))
def test_the_step_is_jits(name: str, planner: Any):
    step, state = STEPS[name]
    with jax.enable_x64(True):
        parallel = autopar.parallelize(step, planner=planner, microbatches=4, devices=jax.devices()[:4])
        assert_close(parallel(state, ROLLOUT), jax.jit(step)(state, ROLLOUT))


@pytest.mark.parametrize("name", STEPS)
def test_one_loop_computes_all_rows(name: str):
    step, state = STEPS[name]
    written, behind = with_rows_first(trace(step, (state, ROLLOUT), {})) or (None, ())
    assert written is not None
    assert {written.graph.types[written.graph.inputs[i]].shape[:2] for i in behind} == {(ROWS, TIME)}
    assert len(in_turn(written.graph, 4, state_pairs=written.state_pairs, named=written.named)) == 1


def test_rows_that_come_first_stay():
    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        return p - jax.grad(lambda p: jnp.mean((x @ p) ** 2))(p)

    assert with_rows_first(trace(step, (WEIGHTS["in"], ROLLOUT["last"]), {})) is None


def test_stages_take_rows_that_come_first_alone():
    planner = autopar.Pipeline(stages=2, microbatches=4)
    with pytest.raises(autopar.PlanningError, match=r"(?s)microbatches of b.'reward'.*put the batch first"):
        autopar.parallelize(rollouts, planner=planner, cluster="8:a100-80g").plan(WEIGHTS, ROLLOUT)
