"""Whether all of cut arrays are finite, as loss scaling asks: each device looks at its own, and one flag is reduced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.sample import slow

ROWS, WIDTH = 64, 32

PLANNERS = [
    autopar.DataParallel(),
    autopar.Zero(2),
    autopar.Zero(3),
    autopar.Megatron(data=2, tensor=4),
    autopar.Auto(),
]


def by_all(arrays: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in arrays]))


def by_any(arrays: list[jax.Array]) -> jax.Array:
    return ~jnp.any(jnp.stack([jnp.any(~jnp.isfinite(x)) for x in arrays]))


def loss(params: Any, x: jax.Array) -> jax.Array:
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.sum(x**2)


def guarded(is_fine: Callable[[list[jax.Array]], jax.Array]) -> Callable[..., Any]:
    """A step that changes nothing where a gradient is not finite; which columns of the batch are large and which rows
    are small goes with it.
    """

    def step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        fine = is_fine(jax.tree.leaves(gradients))
        updated = jax.tree.map(lambda p, g: jnp.where(fine, p - 1e-3 * g, p), params, gradients)
        return updated, value, fine, (x > 2).any(0), (x < 2).all(1)

    return step


def drawn() -> tuple[Any, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = [((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))] * 2
    params = [tuple(draw.normal(size=shape) / 8 for shape in pair) for pair in shapes]
    return params, draw.normal(size=(ROWS, WIDTH))


QUICK = [(by_all, PLANNERS[-2], 1), (by_any, PLANNERS[0], 2)]
CASES = itertools.product([by_all, by_any], PLANNERS, [1, 2])


@pytest.mark.parametrize(
    ("is_fine", "planner", "microbatches"), [*QUICK, *(slow(*case) for case in CASES if case not in QUICK)]
)
def test_a_number_that_is_not_finite_stops_the_update_everywhere(planner: Any, is_fine: Any, microbatches: int):
    with jax.enable_x64():
        params, x = drawn()
        step = guarded(is_fine)
        parallel = autopar.parallelize(step, planner=planner, microbatches=microbatches)
        for row in (None, ROWS - 1):
            broken = x.copy()
            if row is not None:
                broken[row, 1] = np.inf
            ours, theirs = parallel(params, broken), jax.jit(step)(params, broken)
            assert bool(ours[2]) == (row is None)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours, theirs)


@pytest.mark.parametrize(("is_fine", "planner"), [(by_all, PLANNERS[-2]), slow(by_any, PLANNERS[2])])
def test_flags_are_reduced_and_not_gathered(planner: Any, is_fine: Any):
    def step(params: Any, x: jax.Array) -> Any:
        return guarded(is_fine)(params, x)[:3]

    compiled = autopar.parallelize(step, planner=planner).lower(*drawn()).compile()
    flags = [c for c in compiled.plan.collectives if c.dtype == "bool"]
    assert {(c.kind, c.nbytes) for c in flags} == {("all_reduce", 1)}
    compiled.verify().check()


def test_bits_of_integers_are_put_together_whole():
    def bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.reduce_or(x, (0,)), jax.lax.reduce_and(x, (0,))

    x = np.random.default_rng(0).integers(0, 1 << 30, (16, 8), np.int32) | 5
    ours = autopar.parallelize(bits, planner=autopar.DataParallel())(x)
    jax.tree.map(np.testing.assert_array_equal, ours, jax.jit(bits)(x))
