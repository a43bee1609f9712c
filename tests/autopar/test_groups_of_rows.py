"""Products of rows in groups (`jax.lax.ragged_dot`), as experts that drop no token have them: rows are cut as they lie,
and groups that end inside of a piece go on in the next.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.sample import slow

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


CASES = list(itertools.product(PLANNERS, [1, 2]))


@pytest.mark.parametrize(
    ("planner", "microbatches"), [case if i in (0, 3) else slow(*case) for i, case in enumerate(CASES)]
)
def test_the_step_is_jits(planner: Any, microbatches: int):
    with jax.enable_x64():
        args = drawn()
        ours = autopar.parallelize(step, planner=planner, microbatches=microbatches, batch_argnums=1)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours, jax.jit(step)(*args))


@pytest.mark.parametrize("dtype", ["uint8", slow("uint32"), slow("int8")])
def test_sizes_of_any_integers_are_counted_below_zero(dtype: str):
    """What ends before a piece begins is below it: unsigned numbers would come around."""
    experts, x, sizes = drawn()
    args = jax.tree.map(np.float32, experts), np.float32(x), sizes.astype(dtype)
    planner = autopar.Auto(mesh={"x": 8}, pins={"x": "[x, -]"})
    ours = autopar.parallelize(step, planner=planner)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, jax.jit(step)(*args))


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Auto()])
def test_batches_with_groups_of_their_own(planner: Any):
    def of_each(matrices: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sum(jax.vmap(jax.lax.ragged_dot)(x, w, sizes) ** 2))(matrices)

    draw = np.random.default_rng(0)
    with jax.enable_x64():
        args = draw.normal(size=(8, 4, 16, 8)), draw.normal(size=(8, 32, 16)), draw.integers(0, 9, (8, 4))
        ours = autopar.parallelize(of_each, planner=planner)(*args)
        np.testing.assert_allclose(ours, jax.jit(of_each)(*args), rtol=1e-10)


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


def product(matrices: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, matrices, sizes)


def squared(matrices: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    return jnp.sum(product(matrices, x, sizes) ** 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", [product, jax.grad(squared), jax.grad(squared, 1)])
def test_rows_are_held_once_for_each_group(function: Any, dtype: str):
    args = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in ((EXPERTS, 64, 128), (512, 64)))
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    compiled = autopar.parallelize(function, devices=jax.devices()[:1], batch_argnums=1).lower(*args, sizes).compile()
    compiled.verify().check()
    memory = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert compiled.plan.peak_nbytes == pytest.approx(needed, rel=0.02)


def test_a_tpu_multiplies_each_row_by_the_matrix_of_its_group_alone():
    args = tuple(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((16, 1024, 4096), (8192, 1024)))
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)

    def plan(function: Any, cluster: str, *args: Any) -> autopar.Plan:
        return autopar.parallelize(function, cluster=cluster, batch_argnums=1).plan(*args)

    for cluster, groups in (("1:tpu-v5e", 1), ("1:h100", 16)):
        dense = plan(lambda w, x: x @ w, cluster, jax.ShapeDtypeStruct((1024, 4096), "bfloat16"), args[1])
        ragged = plan(product, cluster, *args, sizes)
        assert ragged.seconds["compute"] == pytest.approx(groups * dense.seconds["compute"], rel=0.25)
        rows = 0 if groups == 1 else groups * 8192 * 1024 * 2
        assert ragged.peak_nbytes - sum(x.size * 2 for x in args) - 8192 * 4096 * 2 == pytest.approx(rows, abs=1e6)


def test_no_device_has_all_of_the_work():
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), drawn(64))
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    alone, together = (
        autopar.parallelize(step, cluster=cluster, batch_argnums=1).plan(*args[:2], sizes)
        for cluster in ("1:a100-80g", "8:a100-80g")
    )
    assert together.seconds["compute"] < alone.seconds["compute"] / 4
