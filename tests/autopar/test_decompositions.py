"""Decompositions and triangular solves are as slow on GPUs as they were published to be: column waits for column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg

import autopar
from passes.rules import rules_of
from passes.rules.columns import Columns
from tests.closeness import assert_close


def seconds(step: Callable[..., Any], device: str, *shapes: tuple[int, ...], devices: int = 1) -> float:
    """Those of a step on arrays of float32."""
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return autopar.parallelize(step, cluster=f"{devices}:{device}", progress=False).plan(*arguments).step_seconds


def solved(matrix: jax.Array, sides: jax.Array) -> jax.Array:
    return linalg.triangular_solve(matrix, sides, left_side=True, lower=True)


PUBLISHED: dict[str, tuple[Callable[..., Any], str, tuple[tuple[int, ...], ...], float]] = {
    "jax-ml/jax#9694, V100": (lambda a: linalg.lu(a)[0], "v100-16g", ((4096, 4096),), 41e-3),
    "jax-ml/jax#9694, A100": (lambda a: linalg.lu(a)[0], "a100-40g", ((4096, 4096),), 44e-3),
    "pytorch/pytorch#173788, 16 columns": (lambda a: jnp.linalg.qr(a)[0], "h100", ((16, 16),), 60e-6),
    "pytorch/pytorch#173788, 32 columns": (lambda a: jnp.linalg.qr(a)[0], "h100", ((128, 32),), 189e-6),
    "pytorch/pytorch#12683": (solved, "v100-16g", ((10000, 10000), (10000, 1)), 6.5e-3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_seconds_are_predicted_within_a_half(name: str):
    step, device, shapes, published = PUBLISHED[name]
    assert published / 1.5 < seconds(step, device, *shapes) < published * 1.5


@pytest.mark.parametrize("device", ["a100-80g", "h100"])
def test_a_solve_of_many_sides_is_no_tiled_product(device: str):
    """It has half the flops of one, at the rate of float32 without tensor cores, which is 1/8 of theirs."""
    sides = (8192, 8192)
    product = seconds(jnp.matmul, device, sides, sides)
    assert product < seconds(solved, device, sides, sides) < 8 * product


def test_a_solve_on_tpus_computes_as_products_do():
    sides = (4096, 4096)
    product = seconds(jnp.matmul, "tpu-v5e", sides, sides)
    assert seconds(solved, "tpu-v5e", sides, sides) == pytest.approx(product / 2, rel=0.02)


def test_eigenvalues_are_limited_by_memory():
    """Each column reads what is left of the matrix: below 3 % of a H100's peak (Wang et al. 2024)."""
    assert seconds(lambda a: linalg.eigh(a)[0], "h100", (8192, 8192)) > 9 * 8192**3 / 494.5e12 / 0.03


def test_small_matrices_are_side_by_side_and_large_ones_take_turns():
    small, large = ((64, 128, 128),), ((16, 512, 512),)
    assert seconds(jnp.linalg.cholesky, "a100-80g", *small) < 2 * seconds(jnp.linalg.cholesky, "a100-80g", (128, 128))
    one, all16 = seconds(jnp.linalg.cholesky, "a100-80g", (512, 512)), seconds(jnp.linalg.cholesky, "a100-80g", *large)
    assert all16 > 8 * one
    assert seconds(jnp.linalg.cholesky, "a100-80g", *large, devices=8) < all16 / 4


def test_a_rule_has_the_columns_of_one_matrix():
    graph = autopar.parallelize(linalg.cholesky).trace(jax.ShapeDtypeStruct((4, 64, 64), "float32")).graph
    (rule,) = [rule for rule in rules_of(graph) if rule.columns]
    assert rule.columns == Columns(count=64, seconds=0.5e-6)


def test_sums_over_the_batch_are_solved_for_as_sums() -> None:
    """A filter's gain is the same for all rows: its gradient, in a loop over time, is solved for a sum over them.

    Microbatches of it were refused.
    """

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def filtered(state: tuple[jax.Array, jax.Array], seen: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            mean, spread = state
            gain = jnp.linalg.solve(spread + jnp.eye(len(w)), spread)
            return (mean + (seen - mean) @ gain, w @ (spread - gain @ spread) @ w.T + jnp.eye(len(w))), None

        def loss(w: jax.Array) -> jax.Array:
            (mean, _), _ = jax.lax.scan(filtered, (jnp.zeros_like(x[:, 0]), w @ w.T), x.swapaxes(0, 1))
            return jnp.mean(mean**2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    draws = np.random.default_rng(0)
    w, x = draws.normal(size=(4, 4)) / 2, draws.normal(size=(32, 3, 4))
    with jax.enable_x64(True):
        parallel = autopar.parallelize(step, planner=autopar.DataParallel(), microbatches=2)
        assert_close(parallel(w, x), jax.jit(step)(w, x))
