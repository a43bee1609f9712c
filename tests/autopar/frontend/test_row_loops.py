"""Loops over the rows of the batch: each device runs its own, and the step is `jax.jit`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from passes.layers import loops_over_batch
from tests.closeness import assert_close
from tests.sample import slow

ROWS = 16
DRAWS = np.random.default_rng(0)
PARAMS = {"a": DRAWS.normal(size=(4, 8)), "b": DRAWS.normal(size=(8, 4))}
BATCH = DRAWS.normal(size=(ROWS, 6, 4))

Params = dict[str, jax.Array]


pytestmark = pytest.mark.usefixtures("float64")


def of_row(params: Params, row: jax.Array) -> jax.Array:
    return jnp.tanh(row @ params["a"]) @ params["b"]


def mapped(params: Params, batch: jax.Array) -> jax.Array:
    return (lax.map(lambda row: of_row(params, row).mean(), batch) ** 2).mean()


def recomputed(params: Params, batch: jax.Array) -> jax.Array:
    return lax.map(jax.checkpoint(lambda row: of_row(params, row).mean()), batch).mean()


def through_layers(params: Params, batch: jax.Array) -> jax.Array:
    hidden = lax.map(lambda row: of_row(params, row), jnp.sin(batch))
    return (lax.map(lambda row: of_row(params, row), hidden + batch) ** 2).mean()


def added_up(params: Params, batch: jax.Array) -> jax.Array:
    total, _ = lax.scan(lambda total, row: (total + of_row(params, row).sum(), None), 1.0, batch, reverse=True)
    return total / batch.size


def over_time(params: Params, batch: jax.Array) -> jax.Array:
    def of_sequence(row: jax.Array) -> jax.Array:
        def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(x @ params["a"] + state @ params["b"] @ params["a"]), state.sum()

        return lax.scan(step, jnp.zeros(8), row)[1]

    return lax.map(of_sequence, batch).mean()


def with_noise(params: Params, batch: jax.Array) -> jax.Array:
    keys = jax.random.split(jax.random.key(0), ROWS)
    noisy = lax.map(lambda each: of_row(params, each[1]) * jax.random.normal(each[0], (6, 4)), (keys, batch))
    return (noisy**2).mean()


def until_small(params: Params, batch: jax.Array) -> jax.Array:
    def halved(row: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: jnp.abs(x).max() > 0.5, lambda x: x / 2, row)

    return lax.map(lambda row: of_row(params, lax.stop_gradient(halved(row))).mean(), batch).mean()


LOSSES = (slow(mapped), slow(recomputed), through_layers, added_up, over_time, with_noise, until_small)


def stepped(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params: Params, batch: jax.Array) -> Any:
        value, (grads, of_batch) = jax.value_and_grad(loss, argnums=(0, 1))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, of_batch

    return step


@pytest.mark.parametrize("loss", LOSSES)
def test_each_device_runs_its_own_rows_and_the_step_is_jits(loss: Callable[..., jax.Array]) -> None:
    step = stepped(loss)
    parallel = autopar.parallelize(step, planner=autopar.DataParallel())
    plan = parallel.plan(PARAMS, BATCH)
    # Gradients, the loss and whether a loop goes on are sent: nobody reads others' rows.
    gradients_nbytes = sum(array.nbytes for array in PARAMS.values())
    assert max(collective.nbytes for collective in plan.collectives) <= gradients_nbytes < BATCH.nbytes
    assert_close(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH))


@pytest.mark.parametrize("planner", [autopar.Auto(), slow(autopar.Zero(3)), slow(autopar.Megatron(data=4, tensor=2))])
def test_any_plan_of_such_a_loop_is_the_step(planner: Any) -> None:
    step = stepped(through_layers)
    assert_close(autopar.parallelize(step, planner=planner)(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH))


@pytest.mark.parametrize("rows", [12, slow(8)])
def test_rows_are_shared_as_far_as_devices_divide_them(rows: int) -> None:
    step, batch = stepped(mapped), BATCH[:rows]
    assert_close(autopar.parallelize(step)(PARAMS, batch), jax.jit(step)(PARAMS, batch))


def test_microbatches_have_rows_for_every_device() -> None:
    def step(params: Params, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(mapped)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), microbatches=2)
    assert {collective.kind for collective in parallel.plan(PARAMS, BATCH).collectives} == {"all_reduce"}
    assert_close(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH))


def branching(params: Params, batch: jax.Array) -> jax.Array:
    """A branch of each row's own: side by side, both are computed."""
    return lax.map(lambda row: lax.cond(row[0, 0] > 0, lambda: of_row(params, row).sum(), lambda: 0.0), batch).mean()


def running(params: Params, batch: jax.Array) -> jax.Array:
    return lax.scan(lambda total, row: (total + of_row(params, row).sum(),) * 2, 0.0, batch)[1].mean()


def in_parts(params: Params, batch: jax.Array) -> jax.Array:
    """Rows in parts: those of one part are together already."""
    return lax.map(lambda row: of_row(params, row).mean(), batch, batch_size=8).mean()


def over_layers(params: Params, batch: jax.Array) -> jax.Array:
    stacked = jnp.stack([params["a"] @ params["b"]] * 3)
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, stacked)[0].mean()


def alternating(params: Params, batch: jax.Array) -> jax.Array:
    return lax.scan(lambda total, row: (of_row(params, row).sum() - total, None), 0.0, batch)[0]


@pytest.mark.parametrize("loss", [branching, running, in_parts, slow(over_layers), slow(alternating)])
def test_other_loops_stay_as_they_are(loss: Callable[..., jax.Array]) -> None:
    step = stepped(loss)
    there, one = (autopar.parallelize(step, cluster=f"{n}:a100-80g").trace(PARAMS, BATCH) for n in (8, 1))
    assert there.graph.fingerprint == one.graph.fingerprint
    assert_close(autopar.parallelize(step)(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH))


def test_microbatches_by_hand_stay_one_after_the_other() -> None:
    def step(params: Params, batches: jax.Array) -> Any:
        def add(grads: Params, batch: jax.Array) -> tuple[Params, None]:
            more = jax.grad(lambda p: (of_row(p, batch) ** 2).mean())(params)
            return jax.tree.map(jnp.add, grads, more), None

        grads, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    traced = autopar.parallelize(step).trace(PARAMS, BATCH)
    assert not loops_over_batch(traced.graph, traced.state_pairs)


def clipped(gradient: Params) -> Params:
    norm = jnp.sqrt(sum((g**2).sum() for g in gradient.values()))
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient)


def of_example(params: Params, example: tuple[jax.Array, jax.Array]) -> jax.Array:
    row, target = example
    return ((of_row(params, row) - target) ** 2).sum()


def clipped_in_map(params: Params, batch: Any) -> Params:
    stacked = lax.map(lambda each: clipped(jax.grad(of_example)(params, each)), batch)
    return jax.tree.map(lambda g: g.mean(0), stacked)


def clipped_in_sum(params: Params, batch: Any) -> Params:
    def add(total: Params, each: Any) -> tuple[Params, None]:
        return jax.tree.map(jnp.add, total, clipped(jax.grad(of_example)(params, each))), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)[0]


def adapted(params: Params, batch: Any) -> Params:
    """The outer gradient of tasks, of which each takes a step of its own (MAML)."""

    def of_task(params: Params, each: Any) -> jax.Array:
        own = jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(of_example)(params, each))
        return of_example(own, each)

    return jax.grad(lambda params: lax.map(lambda each: of_task(params, each), batch).mean())(params)


@pytest.mark.parametrize("gradient", [clipped_in_map, clipped_in_sum, adapted])
@pytest.mark.parametrize("shape", [(), (5,)], ids=["examples", "tasks"])
def test_a_gradient_of_each_row_is_of_the_rows_of_its_device(gradient: Any, shape: tuple[int, ...]) -> None:
    """Features, or the few rows of a task, were taken for the rows of a microbatch."""

    def step(params: Params, batch: Any) -> Params:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params, batch))

    batch = DRAWS.normal(size=(ROWS, *shape, 4)), DRAWS.normal(size=(ROWS, *shape, 4))
    for options in ({}, {"microbatches": 2}):
        parallel = autopar.parallelize(step, planner=autopar.DataParallel(), **options)
        plan = parallel.plan(PARAMS, batch)
        assert {collective.kind for collective in plan.collectives} == {"all_reduce"}
        assert sum(c.nbytes * c.count for c in plan.collectives) <= sum(p.nbytes for p in PARAMS.values())
        assert_close(parallel(PARAMS, batch), jax.jit(step)(PARAMS, batch))


def shifted(params: Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(last: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = of_row(params, row)
        return lax.pad(last, made.sum(), [(-1, 1, 0)]), made

    return lax.scan(body, jnp.zeros(4), batch)


def put_together(params: Params, batch: jax.Array) -> tuple[Any, jax.Array]:
    def body(carry: Any, row: jax.Array) -> tuple[Any, jax.Array]:
        total, count = jax.device_put(carry)
        made = of_row(params, row)
        return (total + made, count + 1), made

    return lax.scan(body, (jnp.zeros((6, 4)), jnp.zeros(())), batch)


@pytest.mark.parametrize("fun", [shifted, put_together])
def test_a_carry_that_is_no_sum_leaves_a_loop_over_rows_equal_to_jit(fun: Callable[[Params, jax.Array], Any]):
    ours, theirs = autopar.parallelize(fun)(PARAMS, BATCH), jax.jit(fun)(PARAMS, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours, theirs)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_each_row_draws_what_its_key_does(implementation: str):
    def dropped(params: Params, batch: jax.Array, keys: jax.Array) -> jax.Array:
        def of(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            return of_row(params, row[0]) * jax.random.bernoulli(row[1], 0.5, (6, 4))

        return lax.map(of, (batch, keys))

    keys = jax.random.split(jax.random.key(0, impl=implementation), ROWS)
    ours, theirs = autopar.parallelize(dropped)(PARAMS, BATCH, keys), jax.jit(dropped)(PARAMS, BATCH, keys)
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)
