"""`autopar.simulate` plans each point as the function itself would be planned there, and refuses what says nothing."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import autopar
from passes.plan import Estimate

CLUSTERS = ["4:a100-80g", "2x8:a100-80g"]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def updated(weights: Any, loss: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def row_by_row(weights: Any, rows: Any) -> Any:
    """A step with a loop over rows, which devices run side by side."""
    return updated(weights, lambda w: jax.lax.map(lambda row: jnp.sum(jnp.tanh(row @ w)), rows).mean())


def joined(weights: Any, chosen: Any, rejected: Any) -> Any:
    """A step that joins two batches, whose rows are in groups for its devices."""

    def loss(w: Any) -> Any:
        scores = jnp.tanh(jnp.concatenate([chosen, rejected]) @ w).sum(-1)
        return jax.nn.softplus(scores[: len(chosen)] - scores[len(chosen) :]).mean()

    return updated(weights, loss)


@pytest.mark.parametrize(
    ("step", "args"),
    [(row_by_row, (f32(64, 64), f32(32, 64))), (joined, (f32(64, 64), f32(32, 64), f32(32, 64)))],
    ids=["rows in a loop", "joined batches"],
)
def test_a_point_is_what_the_plan_for_it_says(step: Any, args: Any):
    """The program itself depends on how many devices there are."""
    simulated = autopar.simulate(step, args, cluster=CLUSTERS)
    for row, cluster in zip(simulated.rows, CLUSTERS, strict=True):
        plan = autopar.parallelize(step, cluster=cluster).plan(*args)
        assert row.estimate == Estimate.of(plan)


def test_a_functions_own_memory_limit_is_the_rows_limit():
    args = f32(64, 64), f32(32, 64)
    function = autopar.parallelize(row_by_row, memory_limit="1 KiB")
    (small,) = autopar.simulate(function, args, cluster="2:h100").rows
    assert small.limit_nbytes == pytest.approx(1024, rel=0.2)
    assert not small.fits
    (large,) = autopar.simulate(function, args, cluster="2:h100", memory_limit="1 GiB").rows
    assert large.fits


def test_a_batch_that_the_step_does_not_take_is_a_row_with_the_reason():
    def pairs(weights: Any, rows: Any) -> Any:
        return updated(weights, lambda w: jnp.tanh(rows.reshape(2, 16, -1) @ w).mean())

    simulated = autopar.simulate(pairs, (f32(64, 64), f32(32, 64)), cluster="2:h100", batch=[24, 32])
    refused, planned = simulated.rows
    assert refused.refusal.startswith("a batch of 24 cannot be traced: TypeError: ")
    assert planned.estimate is not None
    assert "a batch of 24" in str(simulated)


@pytest.mark.parametrize("library", ["equinox", "flax.nnx"])
def test_batches_of_a_step_of_modules_are_those_of_its_arrays(library: str):
    """An Equinox module has leaves that are no arrays: its activation."""
    if library == "equinox":
        net = eqx.nn.MLP(64, 64, 256, 1, key=jax.random.key(0))
    else:
        net = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(256, 64, rngs=nnx.Rngs(0)))

    def loss(net: Any, rows: Any) -> Any:
        return jnp.mean(jax.vmap(net)(rows) ** 2)

    simulated = autopar.simulate(
        loss, (net, f32(32, 64)), cluster="2:h100", planner=autopar.DataParallel(), batch=[32, 64]
    )
    flops = [row.estimate.flops for row in simulated.rows if row.estimate]
    assert flops == [rows * 2.0 * (64 * 256 + 256 * 64) for rows in (32, 64)]


def test_a_price_without_a_training_is_refused():
    with pytest.raises(autopar.ArgumentError, match=r"price_per_device_hour=2.5.*\n.*tokens=300e9"):
        autopar.simulate(row_by_row, (f32(64, 64), f32(32, 64)), cluster="2:h100", price_per_device_hour=2.5)


def test_planners_that_are_called_alike_are_rows_of_their_own():
    class Own:
        def __init__(self, stage: int) -> None:
            self.stage = stage

        def plan(self, *given: Any) -> Any:
            return autopar.Zero(self.stage).plan(*given)

    args = f32(64, 64), f32(32, 64)
    simulated = autopar.simulate(row_by_row, args, cluster="2:h100", planner=[Own(1), Own(3)])
    assert [row.scenario and row.scenario.planner_name for row in simulated.rows] == ["Own", "Own (2)"]


def test_a_saved_plan_is_one_planner_among_others():
    """A plan has no hash, and is not spelled out in a table."""
    args = f32(64, 64), f32(32, 64)
    plan = autopar.parallelize(row_by_row, cluster="2:h100", planner=autopar.Zero(3)).plan(*args)
    simulated = autopar.simulate(
        row_by_row, args, cluster="2:h100", planner=[autopar.Manual(plan), autopar.Auto(), autopar.Manual(plan)]
    )
    names = [row.scenario and row.scenario.planner_name for row in simulated.rows]
    assert names == ["Manual(source=<zero-3 plan, data=2>)", "Auto()"]
    assert simulated.rows[0].estimate == Estimate.of(plan)
