"""Buffers of rows, of which a step overwrites the oldest and draws some: each device has rows, and writes its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

ROWS, WIDTH, NEW = 2**18, 84, 16
LIMIT = ROWS * WIDTH * 4 // 2
"""Bytes of a device in which half of the rows have room."""


def step(state: Any, new: jax.Array) -> tuple[Any, jax.Array]:
    rows = jax.lax.dynamic_update_slice_in_dim(state["rows"], new, state["next"], 0)
    drawn = jax.random.randint(jax.random.fold_in(jax.random.key(0), state["next"]), (2 * len(new),), 0, len(rows))
    batch = rows[drawn]
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state["weights"])
    after = (state["next"] + len(new)) % len(rows)
    return {"rows": rows, "next": after, "weights": state["weights"] - gradient}, value


def arguments(rows: int, width: int, new: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    state = {"rows": draw.normal(size=(rows, width)), "next": np.int32(rows - 2 * new - 1), "weights": np.eye(width)}
    return state, draw.normal(size=(new, width))


CASES = [(autopar.Zero(1), None), (autopar.Zero(3), None), (autopar.Auto(), LIMIT)]


@pytest.mark.filterwarnings("ignore:.*of the work of products is computed whole")
@pytest.mark.parametrize(("planner", "limit"), CASES, ids=["zero-1", "zero-3", "auto"])
def test_each_device_keeps_rows_of_its_own(planner: autopar.Planner, limit: int | None):
    """ZeRO left all rows on every device, as eight divide no 84 columns, and Auto cut those into four."""
    types = {"rows": (ROWS, WIDTH), "next": (), "weights": (WIDTH, WIDTH)}
    state = {name: jax.ShapeDtypeStruct(shape, "float32" if shape else "int32") for name, shape in types.items()}
    parallel = autopar.parallelize(step, planner=planner, cluster="8:a100-80g", memory_limit=limit, donate_argnums=0)
    plan: Any = parallel.plan(state, jax.ShapeDtypeStruct((NEW, WIDTH), "float32"))
    at = dict(zip(plan.input_names, plan.inputs, strict=True))["state['rows']"]
    assert at.local_shape((ROWS, WIDTH), plan.mesh) == (ROWS // 8, WIDTH)
    assert all(c.nbytes <= WIDTH * WIDTH * 4 for c in plan.collectives)


@pytest.mark.filterwarnings("ignore:.*of the work of products is computed whole")
@pytest.mark.parametrize("new", [4, 12], ids=["less than a piece", "more than a piece"])
def test_rows_come_around(new: int):
    """What would end past the buffer begins before, over the borders of pieces too."""
    with jax.enable_x64():
        ours, its = arguments(32, 8, new), arguments(32, 8, new)
        parallel = autopar.parallelize(step, planner=autopar.Zero(3), batch_argnums=1, devices=jax.devices()[:4])
        for _ in range(4):
            ours, its = (parallel(*ours)[0], ours[1]), (jax.jit(step)(*its)[0], its[1])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), ours, its)
