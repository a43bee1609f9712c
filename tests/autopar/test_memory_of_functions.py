"""Planned peak memory of functions whose kernels XLA's CPU compiler cuts or joins in its own way, against its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar

pytestmark = pytest.mark.usefixtures("as_users_compile")

ROWS, LENGTH, WIDTH = 256, 64, 32

Network = Callable[[jax.Array, jax.Array], jax.Array]


def of_levels(x: jax.Array, a: jax.Array) -> jax.Array:
    """A kernel would repeat the code of every level for each that is below it."""
    (y, total) = x * a, jnp.zeros(())
    for _ in range(4):
        even, odd = y[:, ::2], y[:, 1::2]
        total, y = total + jnp.sum((even - odd) ** 2), even + odd
    return total + jnp.sum(y**2)


def state_space(x: jax.Array, a: jax.Array) -> jax.Array:
    def join(early: Any, late: Any) -> Any:
        return early[0] * late[0], late[0] * early[1] + late[1]

    _, states = lax.associative_scan(join, (jnp.exp(-jax.nn.softplus(x * a)), x * a), axis=1)
    return jnp.sum(states**2)


def running_maximum(x: jax.Array, a: jax.Array) -> jax.Array:
    """Its transpose puts zeros beside a single element, which the library would repeat."""
    return jnp.sum(lax.associative_scan(jnp.maximum, x * a, axis=1) ** 2)


def quotients(x: jax.Array, a: jax.Array) -> jax.Array:
    """Of two quotients by one broadcast sum, in the softmax and in its transpose, one becomes a product."""
    scores = jnp.einsum("bqd,bkd->bqk", x * a, x)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    return jnp.sum((jax.nn.softmax(scores, -1) @ x) ** 2)


def short_rows(x: jax.Array, a: jax.Array) -> jax.Array:
    """The gradient of halves is joined along rows of less than 128 elements, in the kernel that reads it."""
    value, gate = jnp.split(x * a, 2, -1)
    return jnp.sum((value * jax.nn.sigmoid(gate)) ** 2)


def means_of_windows(x: jax.Array, a: jax.Array) -> jax.Array:
    """The transpose of a sum over windows pads what it reads itself, between elements too."""
    images = (x * a).reshape(ROWS // 8, 16, LENGTH // 2, WIDTH)
    return jnp.sum(lax.reduce_window(images, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2)


def sorted_rows(x: jax.Array, a: jax.Array) -> jax.Array:
    """Its transpose scatters to places that are told with those of the batch, three numbers for each element."""
    return jnp.sum(jnp.sort(x * a, 1)[:, -8:] ** 2)


def rotated(x: jax.Array, a: jax.Array) -> jax.Array:
    """Pairs that are stacked are written once, for the sum and for its transpose."""
    first, second = x[..., ::2] * a[::2], x[..., 1::2] * a[1::2]
    angles = jnp.arange(LENGTH)[:, None] / 10.0 ** jnp.arange(0, WIDTH, 2)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    return jnp.sum(
        jnp.stack([first * cosine - second * sine, first * sine + second * cosine], -1).reshape(x.shape) ** 2
    )


BOUNDS: dict[Network, float] = {
    of_levels: 0.01,
    state_space: 0.01,
    running_maximum: 0.01,
    quotients: 0.01,
    short_rows: 0.01,
    means_of_windows: 0.15,
    sorted_rows: 0.01,
    rotated: 0.01,
}
"""The error of each prediction at most."""


@pytest.mark.parametrize("network", BOUNDS, ids=lambda network: network.__name__)
def test_kernels_are_cut_as_xla_cuts_them(network: Network):
    def step(a: jax.Array, x: jax.Array) -> jax.Array:
        return a - 1e-3 * jax.grad(lambda a: network(x, a))(a)

    given = jax.ShapeDtypeStruct((WIDTH,), "float32"), jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), "float32")
    compiled = autopar.parallelize(step, planner=autopar.DataParallel()).lower(*given).compile()
    assert abs(compiled.plan.peak_nbytes / compiled.needed_nbytes - 1) <= BOUNDS[network]
