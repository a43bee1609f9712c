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


@pytest.mark.parametrize(
    ("shapes", "attributes", "wanted"),
    [
        # einsum bik,bjk->bij of eight: the batch is a window, over one operand that is dilated
        (
            ("8,128,16", "8,128,16", "8,128,128"),
            "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf",
            2 * 8 * 128 * 128 * 16,
        ),
        # a product with the weights of eight heads, of which the result has a dimension
        (
            ("128,128,1", "8,128,16", "128,8,16"),
            "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=bf0_0io->b0f",
            2 * 128 * 128 * 8 * 16,
        ),
        (
            ("8,16,16,3", "3,3,3,4", "8,16,16,4"),
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 8 * 16 * 16 * 27 * 4,
        ),
        (("128,64", "64,32", "128,32"), "dim_labels=bf_io->bf", 2 * 128 * 64 * 32),
    ],
)
def test_the_windows_that_a_tpu_makes_of_products_count_as_the_products(
    shapes: tuple[str, str, str], attributes: str, wanted: int
):
    lhs, rhs, result = shapes
    text = f"""ENTRY %main (a: bf16[{lhs}], b: bf16[{rhs}]) -> bf16[{result}] {{
  %a = bf16[{lhs}] parameter(0)
  %b = bf16[{rhs}] parameter(1)
  ROOT %c = bf16[{result}] convolution(%a, %b), {attributes}
}}"""
    assert product_flops(text) == wanted
