"""Layers of a step that goes forward and backward in each iteration of a loop, as over parts of a batch."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from passes.memory import PERSISTENT
from passes.transforms import KEPT, layering
from tests.closeness import assert_close

WIDTH, ROWS, DEPTH, PARTS = 64, 64, 4, 2


def gated(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A layer that makes much that is cheap of one product."""
    values, gates = jnp.split(x @ weight, 2, axis=-1)
    return x + jnp.tanh(values) * jax.nn.sigmoid(gates) * jnp.sin(values)


def looped_loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda x, weight: (gated(x, weight), None), x, weights)[0] ** 2)


def written_loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    for index in range(DEPTH):
        x = gated(x, weights[index])
    return jnp.sum(x**2)


LOSSES = {"a loop": looped_loss, "written out": written_loss}


def accumulating(loss: Any, weights: Any, parts: jax.Array) -> Any:
    """A step of gradients that a loop of the user's adds up."""

    def add(total: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(jnp.add, total, gradients), value

    total, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), parts)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, total), values.sum()


def arguments(dtype: str = "float64", scale: int = 1) -> Any:
    draw = np.random.default_rng(0).normal
    width = scale * WIDTH
    shapes = (DEPTH, width, 2 * width), (PARTS, scale * ROWS, width)
    return tuple(jnp.asarray(draw(size=shape) / width**0.5, dtype) for shape in shapes)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kept", KEPT[1:])
def test_the_step_is_the_same(name: str, kept: Any):
    with jax.enable_x64(True):
        given, step = arguments(), partial(accumulating, LOSSES[name])
        parallel = autopar.parallelize(step, planner=autopar.Zero(3), remat=kept)
        plan = parallel.plan(*given)
        assert plan.remat
        assert set(plan.remat) == {kept}
        assert_close(parallel(*given), jax.jit(step)(*given))


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("name", LOSSES)
def test_less_is_kept(name: str):
    temporaries = list[int]()
    for kept in KEPT:
        step = autopar.parallelize(
            partial(accumulating, LOSSES[name]), planner=autopar.DataParallel(), devices=jax.devices()[:1], remat=kept
        )
        compiled = step.lower(*arguments("float32", scale=4)).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        held = compiled.plan.nbytes
        predicted = sum(size for cause, size in held.items() if cause not in (*PERSISTENT, "outputs"))
        assert temporaries[-1] == pytest.approx(predicted, rel=0.1), kept
    assert temporaries[0] > 1.2 * temporaries[1] > 1.2 * temporaries[2]


def test_a_limit_that_needs_less_kept_is_met():
    """Within half of its memory such a step was refused, as its layers were not looked for."""
    given = jax.eval_shape(partial(arguments, "float32", scale=16))

    def within(limit: int | None) -> autopar.Plan:
        step = partial(accumulating, looped_loss)
        return autopar.parallelize(step, cluster="8:a100-80g", donate_argnums=0, memory_limit=limit).plan(*given)

    free = within(None)
    tight = within(free.peak_nbytes // 2)
    assert tight.peak_nbytes <= free.peak_nbytes // 2
    assert tight.remat


def test_two_such_loops_have_no_layers_which_is_said():
    def step(weights: jax.Array, parts: jax.Array) -> Any:
        weights, first = accumulating(looped_loss, weights, parts)
        weights, second = accumulating(looped_loss, weights, parts)
        return weights, first + second

    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), remat="inputs")
    with pytest.warns(UserWarning, match="remat='inputs'") as caught:
        plan = parallel.plan(*arguments("float32"))
    assert not plan.remat
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        assert not autopar.parallelize(step, planner=autopar.DataParallel(), remat=()).plan(*arguments("float32")).remat


def test_layers_of_the_step_itself_come_first():
    def step(weights: jax.Array, parts: jax.Array) -> Any:
        return jax.value_and_grad(looped_loss)(accumulating(looped_loss, weights, parts)[0], parts[0])

    graph = autopar.parallelize(step).trace(*arguments("float32")).graph
    assert layering(graph).count == 1
    assert layering(graph).are_loops
