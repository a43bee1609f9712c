"""Products of rows in groups (`jax.lax.ragged_dot`), as experts that drop no token have them: rows are cut as they lie,
and groups that end inside of a piece go on in the next.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.sample import half

ROWS, WIDTH, HIDDEN, EXPERTS = 64, 16, 32, 4

PLANNERS = [autopar.DataParallel(), autopar.Zero(3), autopar.Megatron(data=2, tensor=4), autopar.Auto()]


def loss(experts: Any, x: jax.Array, sizes: jax.Array) -> jax.Array:
    for up, down in experts:
        x = x + jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(x, up, sizes)), down, sizes)
    return jnp.sum(x**2)


def step(experts: Any, x: jax.Array, sizes: jax.Array) -> tuple[Any, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(experts, x, sizes)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, experts, gradients), value


def drawn(scale: int = 1) -> tuple[Any, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    width, hidden = scale * WIDTH, scale * HIDDEN
    experts = [
        (draw.normal(size=(EXPERTS, width, hidden)) / width, draw.normal(size=(EXPERTS, hidden, width)) / hidden)
        for _ in range(2)
    ]
    return experts, draw.normal(size=(scale * ROWS, width)), np.asarray([13, 0, 38, 9], np.int32) * scale


@pytest.mark.parametrize(("planner", "microbatches"), half(PLANNERS, [1, 2]))
def test_the_step_is_jits(planner: Any, microbatches: int):
    with jax.enable_x64():
        args = drawn()
        ours = autopar.parallelize(step, planner=planner, microbatches=microbatches, batch_argnums=1)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours, jax.jit(step)(*args))


def test_rows_are_cut_and_gradients_reduced_once():
    plan = autopar.parallelize(step, cluster="8:a100-80g", planner=autopar.DataParallel(), batch_argnums=1).plan(
        *drawn()
    )
    specs = {name: str(spec) for name, spec in zip(plan.input_names, plan.inputs, strict=True)}
    assert (specs["x"], specs["sizes"]) == ("[data, -]", "[-]")
    weights = [c for c in plan.collectives if c.nbytes > 8]
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    assert sum(c.count for c in weights) == 4


def test_a_product_takes_the_flops_of_each_row_with_its_group():
    plan = autopar.parallelize(step, cluster="1:a100-80g", batch_argnums=1).plan(*drawn())
    # Twice a layer forward, and all but the gradient of x once more for each operand.
    assert sum(plan.flops.values()) == (3 * 4 - 1) * 2 * ROWS * WIDTH * HIDDEN


def test_no_device_has_all_of_the_work():
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), drawn(64))
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    alone, together = (
        autopar.parallelize(step, cluster=cluster, batch_argnums=1).plan(*args[:2], sizes)
        for cluster in ("1:a100-80g", "8:a100-80g")
    )
    assert together.seconds["compute"] < alone.seconds["compute"] / 4
