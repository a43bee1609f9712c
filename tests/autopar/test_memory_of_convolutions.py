"""Planned peak memory of small convolutional networks against XLA's own analysis for CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.sample import each, half, slow

pytestmark = pytest.mark.usefixtures("as_users_compile")

PLANNERS: dict[str, Callable[[], Any]] = {
    "dp": autopar.DataParallel,
    "megatron": lambda: autopar.Megatron(data=2, tensor=4),
    "auto": autopar.Auto,
}


def convolved(x: jax.Array, weights: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    layouts = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, weights, (stride, stride), "SAME", dimension_numbers=layouts, feature_group_count=groups
    )


def strided(weights: Any, x: jax.Array) -> jax.Array:
    return convolved(jax.nn.relu(convolved(x, weights[0], 2)), weights[1])


def widened(weights: Any, x: jax.Array) -> jax.Array:
    y = jax.nn.relu(jax.lax.conv_transpose(x, weights[0], (2, 2), "SAME"))
    return jax.lax.conv_transpose(y, weights[1], (2, 2), "SAME")


def grouped(weights: Any, x: jax.Array) -> jax.Array:
    return convolved(jax.nn.relu(convolved(x, weights[0])), weights[1][:, :, :8], groups=4)


def depthwise(weights: Any, x: jax.Array) -> jax.Array:
    return convolved(jax.nn.relu(convolved(x, weights[0])), weights[1][:, :, :1], groups=32)


def most(weights: Any, x: jax.Array, padding: str = "VALID") -> jax.Array:
    y = jax.nn.relu(convolved(x, weights[0]))
    y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    return convolved(y, weights[1])


def most_of_padded(weights: Any, x: jax.Array) -> jax.Array:
    return most(weights, x, "SAME")


def mean(weights: Any, x: jax.Array) -> jax.Array:
    y = jax.nn.relu(convolved(x, weights[0]))
    return convolved(jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), weights[1])


def of_small_images(weights: Any, x: jax.Array) -> jax.Array:
    y = jax.nn.relu(convolved(x[:, :2, :2], weights[0]))
    return convolved(jax.nn.relu(convolved(y, weights[1])), weights[1])


def error(network: Callable[[Any, jax.Array], jax.Array], planner: str, dtype: str, count: int | None) -> float:
    """The error of the prediction of a training step, as a share of what XLA reports."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(network(weights, x).astype("float32") ** 2)

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    weights = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((3, 3, 8, 32), (3, 3, 32, 32))]
    x = jax.ShapeDtypeStruct((32, 16, 16, 8), dtype)
    parallel = autopar.parallelize(step, planner=PLANNERS[planner](), donate_argnums=0, microbatches=count)
    compiled = parallel.lower(weights, x).compile()
    analysis = compiled.memory_analysis()
    measured = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return compiled.plan.peak_nbytes / (measured + analysis.temp_size_in_bytes) - 1


DTYPES = ("float32", "bfloat16")
WAYS = (("dp", None), ("dp", 2), ("megatron", None), ("auto", None))
"""Planners with numbers of microbatches."""


@pytest.mark.parametrize(("way", "dtype"), half(WAYS, DTYPES))
def test_a_convolution_is_laid_out_for_the_library(way: tuple[str, int | None], dtype: str):
    """Whatever it computes in, and in the loop of microbatches as well: there the program does it, not XLA."""
    planner, count = way
    assert error(strided, planner, dtype, count) == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize(
    ("planner", "dtype"),
    [("dp", "float32"), *(slow(*case) for case in [("auto", "float32"), ("dp", "bfloat16"), ("auto", "bfloat16")])],
)
def test_a_transposed_convolution_is_held_as_elsewhere_in_the_loop_of_microbatches(planner: str, dtype: str):
    assert error(widened, planner, dtype, 2) == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize(("network", "count", "dtype"), each((most, mean), (None, 2), DTYPES))
def test_windows_are_reduced_as_xla_reduces_them(
    network: Callable[[Any, jax.Array], jax.Array], count: int | None, dtype: str
):
    """A kernel that looks for the choice of each window writes its value too, which nothing reads; a window pads what
    it reads itself.
    """
    assert error(network, "dp", dtype, count) == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize(
    ("planner", "dtype"), [*half(("dp", "megatron"), DTYPES), *(slow("auto", dtype) for dtype in DTYPES)]
)
def test_a_small_image_is_held_with_the_zeros_around_it(planner: str, dtype: str):
    assert error(of_small_images, planner, dtype, None) == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.01), slow("bfloat16", 0.15)])
def test_small_images_of_microbatches(dtype: str, bound: float):
    assert 0 <= error(of_small_images, "dp", dtype, 2) <= bound


def test_groups_are_held_as_elsewhere_in_the_loop_of_microbatches():
    assert error(grouped, "dp", "float32", None) == pytest.approx(0, abs=0.005)
    assert error(grouped, "dp", "float32", 2) == pytest.approx(0, abs=0.05)


def test_groups_of_one_are_computed_in_pairs_and_masked():
    assert error(depthwise, "dp", "float32", 2) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.005), slow("bfloat16", 0.03)])
def test_windows_are_padded_before_their_choices_are_found(dtype: str, bound: float):
    assert error(most_of_padded, "dp", dtype, None) == pytest.approx(0, abs=bound)
