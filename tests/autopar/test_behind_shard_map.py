"""Behind a `shard_map` of the user's a batch goes on: hand-made plans gathered it there and computed the rest whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec

import autopar

ROWS, WIDTH, OUT, BLOCK = 64, 16, 8, 4

Params = dict[str, jax.Array]


def _twice(source: Any, target: Any) -> None:
    """A kernel: twice the hyperbolic tangent of a block of rows."""
    target[...] = 2 * jnp.tanh(source[...])


def by_blocks(x: jax.Array) -> jax.Array:
    """The kernel over all blocks of rows of an array."""
    block = pallas.BlockSpec((BLOCK, WIDTH), lambda row: (row, 0))
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    called = pallas.pallas_call(
        _twice, out_shape=result, grid=(len(x) // BLOCK,), in_specs=[block], out_specs=block, interpret=True
    )
    return called(x)


def centred(x: jax.Array) -> jax.Array:
    """The rows less the mean of all devices' rows."""
    return x - jax.lax.pmean(x.mean(0), "rows")


def mapped(function: Any, devices: int) -> Any:
    mesh = jax.make_mesh(
        (devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    rows = PartitionSpec("rows")
    return jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)


def step_of(function: Any) -> Any:
    """A step by SGD on a sum of squares behind a function of rows, which counts as a constant backward."""

    def loss(params: Params, x: jax.Array) -> jax.Array:
        hidden = x @ params["into"]
        hidden = hidden + jax.lax.stop_gradient(function(jax.lax.stop_gradient(hidden)))
        return jnp.sum((jnp.tanh(hidden @ params["out"]) - 1.0) ** 2)

    def step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return {name: params[name] - 0.01 * gradients[name] for name in params}, value

    return step


@pytest.mark.parametrize("function", [by_blocks, centred], ids=["a Pallas kernel", "a mean"])
@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Zero(1)], ids=["data parallel", "zero"])
def test_a_batch_goes_on_behind_a_shard_map(function: Any, planner: Any) -> None:
    rng = np.random.default_rng(0)
    params = {
        "into": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32),
        "out": jnp.asarray(rng.normal(size=(WIDTH, OUT)), jnp.float32),
    }
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    step = step_of(mapped(function, 4))
    parallel: Any = autopar.parallelize(step, planner=planner, devices=jax.devices()[:4])
    plan = parallel.plan(params, x)
    assert all(collective.nbytes < ROWS * OUT for collective in plan.collectives if collective.kind == "all_gather")
    assert not plan.to_json()["replicated"]
    updated, expected = parallel(params, x), jax.jit(step)(params, x)
    for got, known in zip(jax.tree.leaves(updated), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, known, rtol=1e-5, atol=1e-5)


def test_weights_of_another_size_are_no_batch() -> None:
    """Weights that a `shard_map` cuts by the batch's axis, as under FSDP, are not taken for rows."""

    def local(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ jax.lax.all_gather(weight, "rows", tiled=True)

    def step(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(lambda w: jnp.sum(mapped_two(x, w) ** 2))(weight)
        return weight - 0.01 * gradient, value

    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    rows = PartitionSpec("rows")
    mapped_two = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False)
    weight, x = jnp.ones((WIDTH, OUT)), jnp.ones((ROWS, WIDTH))
    plan = autopar.parallelize(step, planner=autopar.DataParallel(), devices=jax.devices()[:4]).plan(weight, x)
    assert isinstance(plan, autopar.Plan)
    assert [str(spec) for spec in plan.inputs] == ["[-, -]", "[rows, -]"]
