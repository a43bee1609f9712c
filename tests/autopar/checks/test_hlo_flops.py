"""Flops of products as XLA's own text has them: those of loops as often as they run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.checks.hlo_flops import product_flops


def flops(function: Any, *shapes: tuple[int, ...]) -> float:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return product_flops(jax.jit(function).lower(*arguments).compile().as_text())


def repeated(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=5)[0]


def convolved(x: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=groups)


@pytest.mark.parametrize(
    ("function", "shapes", "wanted"),
    [
        (lambda a, b: a @ b, [(64, 32), (32, 16)], 2 * 64 * 32 * 16),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(3, 8, 16), (3, 16, 4)], 2 * 3 * 8 * 16 * 4),
        (repeated, [(64, 32), (32, 32)], 5 * 2 * 64 * 32 * 32),
        (convolved, [(8, 3, 16, 16), (4, 3, 3, 3)], 2 * 8 * 16 * 16 * 4 * 27),
        (lambda x, k: convolved(x, k, 2), [(8, 4, 16, 16), (6, 2, 3, 3)], 2 * 8 * 16 * 16 * 6 * 18),
        (jnp.tanh, [(64, 32)], 0),
    ],
)
def test_products_count(function: Any, shapes: Any, wanted: int):
    assert flops(function, *shapes) == wanted
