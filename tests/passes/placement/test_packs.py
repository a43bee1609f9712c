"""Small all-reduces that a program on CPUs packs into one array."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend import trace
from passes.cluster import Measured, Mesh, collectives, parse_cluster
from passes.ir import TensorType
from passes.placement import Background, resharding_plan
from passes.sharding import PACKED_NBYTES, Behind, Resharder, parse_spec
from tests.sample import each

SIZES = (16, 64, 256, 32, 8)


def weights(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    shapes = itertools.pairwise(SIZES)
    return [(jax.random.normal(key, (m, n)) * 0.1, jnp.full((n,), 0.1)) for m, n in shapes]


def step(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    """Plain layers and a sum as loss, each gradient read by its own update alone."""

    def loss(params: Any) -> jax.Array:
        x = batch
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.sum(x**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradients), value


def normalised(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    """Layers normalised over the batch: the second mean waits for the first."""

    def loss(params: Any) -> jax.Array:
        x = batch
        for w, b in params:
            x = jnp.tanh(x @ w + b)
            x = (x - jnp.mean(x, 0)) * jax.lax.rsqrt(jnp.var(x, 0) + 1e-3)
        return jnp.sum(x**3)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradients), value


BATCH = np.random.default_rng(0).normal(size=(32, SIZES[0])).astype(np.float32)


def test_small_gradients_and_the_loss_are_one_all_reduce() -> None:
    params = weights(jax.random.key(0))
    compiled = autopar.parallelize(step, planner=autopar.DataParallel()).lower(params, BATCH).compile()
    gradients = sum(array.nbytes for array in jax.tree.leaves(params))
    assert [(c.kind, c.count, c.nbytes) for c in compiled.plan.collectives] == [("all_reduce", 1, gradients + 4)]
    compiled.verify().check()


def test_a_large_gradient_is_an_all_reduce_by_itself() -> None:
    params = weights(jax.random.key(0))
    wide = [*params, (jnp.ones((SIZES[-1], 1 << 12)), jnp.zeros((1 << 12,)))]  # twice what is packed, and a quarter
    compiled = autopar.parallelize(step, planner=autopar.DataParallel()).lower(wide, BATCH).compile()
    small = sum(array.nbytes for array in jax.tree.leaves(wide)) - 2 * PACKED_NBYTES
    assert sorted(c.nbytes for c in compiled.plan.collectives) == sorted((2 * PACKED_NBYTES, small + 4))
    compiled.verify().check()


def test_a_mean_and_the_mean_of_squares_are_one_all_reduce() -> None:
    """The variance of the whole batch is taken from both, not reduced once more."""

    def moments(batch: jax.Array) -> jax.Array:
        mean, squares = jnp.mean(batch, 0), jnp.mean(batch**2, 0)
        return (batch - mean) * jax.lax.rsqrt(jnp.maximum(squares - mean**2, 0.0) + 1e-3)

    parallel = autopar.parallelize(moments, planner=autopar.DataParallel())
    compiled = parallel.lower(BATCH).compile()
    assert [(c.kind, c.count, c.nbytes) for c in compiled.plan.collectives] == [("all_reduce", 1, 2 * 4 * SIZES[0])]
    compiled.verify().check()
    np.testing.assert_allclose(parallel(BATCH), jax.jit(moments)(BATCH), rtol=1e-5, atol=1e-5)


def test_the_seconds_of_a_plan_are_those_of_its_packs() -> None:
    cluster = parse_cluster("8:cpu")
    plan = autopar.parallelize(normalised, cluster=cluster, planner=autopar.DataParallel()).plan(
        weights(jax.random.key(0)), BATCH
    )
    mesh = Mesh(axes=("data",), sizes=(8,), cluster=cluster)
    packed = sum(c.count * collectives.seconds(c.kind, c.nbytes, mesh.group(c.axes)) for c in plan.collectives)
    launches = plan.seconds["all_reduce"] - packed
    several = sum(c.count for c in plan.collectives)
    assert several * cluster.group().device.launch_seconds <= launches * (1 + 1e-9)
    assert launches < 0.5 * packed


PLANNERS = (autopar.DataParallel(), autopar.Zero(2), autopar.Megatron(data=4, tensor=2))


@pytest.mark.parametrize(("fun", "dtype", "planner"), each((step, normalised), ("float32", "bfloat16"), PLANNERS))
def test_packed_programs_are_what_plans_and_predictions_say(fun: Callable[..., Any], dtype: str, planner: Any) -> None:
    params = jax.tree.map(lambda x: x.astype(dtype), weights(jax.random.key(1)))
    batch = jnp.asarray(BATCH, dtype)
    parallel = autopar.parallelize(fun, planner=planner, donate_argnums=0)
    compiled = parallel.lower(params, batch).compile()
    compiled.verify().check()
    assert compiled.plan.peak_nbytes == pytest.approx(compiled.needed_nbytes, rel=0.01)
    expected = jax.jit(fun)(params, batch)
    results = compiled(jax.tree.map(jnp.copy, params), batch)
    tolerance = 1e-5 if dtype == "float32" else 0.1
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=tolerance, atol=tolerance * np.abs(y).max())


def test_sums_over_two_axes_one_after_the_other_are_packed_as_well() -> None:
    """Where a sum over both axes at once is slow, each is two steps, and so is the pack."""
    times = {2: 1e-5, 4: 1e-5, 8: 1.0}
    measured = [Measured(kind="all_reduce", ranks=n, alpha_seconds=a, bytes_per_second=1e9) for n, a in times.items()]
    known = parse_cluster("8:cpu")
    cluster = replace(known, groups=(replace(known.group(), measured=tuple(measured)),))
    params, batch = weights(jax.random.key(3)), np.tile(BATCH, (64, 1))
    parallel = autopar.parallelize(step, cluster=cluster, planner=autopar.Auto(mesh={"x": 2, "y": 4}))
    compiled = parallel.lower(params, batch).compile()
    compiled.verify().check()
    plan, graph = compiled.plan, trace(step, (params, batch), {}).graph
    packs = resharding_plan(graph, plan.layout, Resharder(plan.mesh), regather=plan.regather).packs
    axes = {tuple(s.axes for s in pack.reductions[0].steps) for several in packs.values() for pack in several}
    assert axes & {(("x",), ("y",)), (("y",), ("x",))}
    assert compiled.plan.peak_nbytes == pytest.approx(compiled.needed_nbytes, rel=0.05)
    for x, y in zip(*map(jax.tree.leaves, (compiled(params, batch), jax.jit(step)(params, batch))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


def test_a_mean_that_waits_for_another_is_not_packed_with_it() -> None:
    plan = autopar.parallelize(normalised, planner=autopar.DataParallel()).plan(weights(jax.random.key(2)), BATCH)
    assert sum(c.count for c in plan.collectives) > 2 * len(SIZES)


def test_accelerators_are_left_to_their_compilers() -> None:
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:h100")
    plan = parallel.plan(weights(jax.random.key(0)), BATCH)
    assert sum(c.count for c in plan.collectives) == 2 * len(SIZES) - 1


def test_a_small_array_pays_its_share_of_a_pack_and_a_large_one_by_itself() -> None:
    resharder = Resharder(Mesh(axes=("x",), sizes=(8,), cluster=parse_cluster("8:cpu")))
    small, whole, large = (TensorType(shape=(n,), dtype="float32") for n in (1 << 8, 1 << 14, 1 << 15))
    ends, launch = (parse_spec("[-] add@x"), parse_spec("[-]")), resharder.mesh.cluster.group().device.launch_seconds
    behind = Behind(
        kinds=("all_reduce",),
        combined_nbytes=whole.nbytes,
        sent_nbytes=whole.nbytes,
        flops=(),
        small_nbytes=whole.nbytes,
    )
    each = resharder.cost(small, *ends, behind) - launch
    assert np.isclose(64 * each, resharder.cost(whole, *ends) - launch)
    assert resharder.cost(large, *ends, behind) == resharder.cost(large, *ends)


def test_the_bytes_of_a_pack_are_those_of_small_gradients() -> None:
    params = weights(jax.random.key(0))
    wide = [*params, (jnp.ones((SIZES[-1], 1 << 14)), jnp.zeros((1 << 14,)))]  # half a MiB, and one that is packed
    gradients, loss_nbytes = [array.nbytes for array in jax.tree.leaves(wide)], 4
    behind = Background.of(trace(step, (wide, BATCH), {}).graph).gradient
    assert behind.small_nbytes == sum(n for n in gradients if n <= PACKED_NBYTES) + loss_nbytes
    assert behind.combined_nbytes == sum(gradients) + loss_nbytes
