"""Layers in a loop compute again what takes longer to be stacked, with and without a memory limit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Plan
from benchmarks.scanned_layers import lstm
from tests.closeness import assert_close

WIDTH, ROWS, DEPTH = 32, 64, 4


def loss(weights: Any, x: jax.Array) -> jax.Array:
    """A stack of gated layers in a loop, each of which makes much that is cheap of one product."""

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        values, gates = jnp.split(x @ weight, 2, axis=-1)
        return x + jnp.tanh(values) * jax.nn.sigmoid(gates) * jnp.sin(values), None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)


def step(weights: Any, x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value


def arguments(dtype: str = "float32", scale: int = 1) -> Any:
    draw = np.random.default_rng(0).normal
    shapes = (DEPTH, scale * WIDTH, 2 * scale * WIDTH), (scale * ROWS, scale * WIDTH)
    return tuple(jnp.asarray(0.1 * draw(size=shape), dtype) for shape in shapes)


def planned(**options: Any) -> Plan:
    """The searched plan of a wider stack on 8 A100."""
    given = jax.eval_shape(lambda: arguments(scale=32))
    return autopar.parallelize(step, cluster="8:a100-80g", donate_argnums=0, **options).plan(*given)


def test_less_is_stacked_where_that_is_faster():
    free, written = planned(), planned(remat="everything")
    assert free.remat == ("matmuls",)
    assert written.remat == ("everything",)
    assert free.step_seconds < written.step_seconds
    assert free.peak_nbytes < written.peak_nbytes
    (other,) = [each for each in free.solution.alternatives if each.name.startswith("as written")]
    assert other.seconds == pytest.approx(written.step_seconds)
    assert free.solution.bound <= free.step_seconds


def test_a_deadline_leaves_the_step_as_it_is_written():
    plan = planned(planner=autopar.Auto(seconds=1e-9))
    assert (plan.remat, plan.solution.status) == ((), "time limit")


def test_the_step_is_the_same():
    with jax.enable_x64(True):
        given = arguments("float64")
        parallel = autopar.parallelize(step)
        assert parallel.plan(*given).remat
        assert_close(parallel(*given), jax.jit(step)(*given))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["8:a100-80g", "2x8:h100"])
def test_a_smaller_limit_gives_no_faster_plan_of_a_recurrent_network(cluster: str):
    """On 2 x 8 H100 an LSTM of 1024 within .75 of its memory was predicted at 0.91 of the plan without a limit."""
    training = lstm(width=1024, batch=256)

    def within(limit: int | None) -> Plan:
        parallel = autopar.parallelize(
            training.step, cluster=cluster, planner=autopar.Auto(max_axes=1), donate_argnums=0, memory_limit=limit
        )
        return parallel.plan(training.state, training.batch)

    free = within(None)
    tight = within(int(0.75 * free.peak_nbytes))
    assert tight.peak_nbytes <= 0.75 * free.peak_nbytes
    assert free.step_seconds <= tight.step_seconds * (1 + 1e-9)


def test_weights_that_a_loop_stacks_stay_whole_under_data_parallelism():
    """Cut over the devices, each was gathered again going backward, which took less time than to stack it whole."""

    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        layers = jnp.stack([weight, weight + 1])
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T), None), x, layers)[0] ** 2)

    given = jax.ShapeDtypeStruct((128, 512), "float32"), jax.ShapeDtypeStruct((8, 16, 128), "float32")
    plan = autopar.parallelize(jax.grad(loss), cluster="8:cpu", planner=autopar.DataParallel()).plan(*given)
    assert {each.kind for each in plan.collectives} == {"reduce_scatter"}


@pytest.mark.parametrize("options", [{}, {"microbatches": 4}], ids=["whole", "microbatches"])
def test_a_gradient_in_parts_is_reduced_once_for_all_layers(options: dict[str, Any]):
    """The parts of a layer's weight were reduced before they were put together, in each layer of each microbatch."""

    def attending(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            scores = (x @ weight[0]) @ (x @ weight[1]).swapaxes(1, 2)
            return x + jax.nn.softmax(scores) @ (x @ weight[2]), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    def attending_step(weights: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(attending)(weights, x)
        return weights - 1e-3 * gradients, value

    draw = np.random.default_rng(0).normal
    given = 0.1 * draw(size=(DEPTH, 3, WIDTH, WIDTH)), draw(size=(ROWS, 4, WIDTH))
    with jax.enable_x64(True):
        parallel = autopar.parallelize(attending_step, planner=autopar.DataParallel(), **options)
        sent = [(c.kind, c.count, c.nbytes) for c in parallel.plan(*given).collectives]
        assert {(kind, count) for kind, count, _ in sent} == {("all_reduce", 1)}
        assert sum(nbytes for *_, nbytes in sent) == given[0].nbytes + 8
        assert_close(parallel(*given), jax.jit(attending_step)(*given), 1e-9)
