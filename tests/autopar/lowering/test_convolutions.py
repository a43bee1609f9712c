"""Convolutions on pieces: in the order of XLA:CPU's library on CPUs, as they were written elsewhere, and the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core

import autopar
from tests.sample import each, half

LAST = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NHWDC", "HWDIO", "NHWDC")}
FIRST = {1: ("NCH", "OIH", "NCH"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCHWD", "OIHWD", "NCHWD")}
MIXED = {1: ("NHC", "OHI", "CHN"), 2: ("NWCH", "IHOW", "CNWH"), 3: ("NDCWH", "OHWDI", "DNHWC")}


def convolutions(jaxpr: Any) -> Iterator[Any]:
    """The dimension numbers of every convolution of a program, also of the programs in it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield equation.params["dimension_numbers"]
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from convolutions(inner)


def in_order(numbers: Any) -> bool:
    """Whether a convolution has batch first and features last, and kernels their input features before the others."""
    inner, last = tuple(range(1, len(numbers.lhs_spec) - 1)), len(numbers.lhs_spec) - 1
    images, kernel = (0, last, *inner), (last, last - 1, *range(last - 1))
    return (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)) == (images, kernel, images)


def convolved(layouts: tuple[str, str, str], **options: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A convolution of images by a kernel in these layouts."""
    given = {"padding": "SAME", **options}
    strides = given.pop("window_strides", (1,) * (len(layouts[0]) - 2))
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, strides, dimension_numbers=layouts, **given)


def shaped(layouts: tuple[str, str, str], groups: int = 1, channels: int = 4) -> tuple[jax.Array, jax.Array]:
    """Sixteen images, and a kernel for them."""
    draw = np.random.default_rng(len(layouts[0])).normal
    images = {"N": 16, "C": channels, "H": 5, "W": 4, "D": 6}
    window = {"O": 2 * channels, "I": channels // groups, "H": 3, "W": 2, "D": 3}
    shapes = ([images[d] for d in layouts[0]], [window[d] for d in layouts[1]])
    x, kernel = (jnp.asarray(draw(size=shape), "float64") for shape in shapes)
    return x, kernel


def step_of(network: Callable[[jax.Array, jax.Array], jax.Array], loop: bool) -> Callable[..., Any]:
    """Gradients of a sum of squares by both, once or in a loop over the kernel's changes."""

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(network(x, kernel)) ** 2)

    def step(x: jax.Array, kernel: jax.Array) -> Any:
        if not loop:
            return jax.grad(loss, argnums=(0, 1))(x, kernel)

        def again(carried: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            x, kernel = carried
            value, (of_x, of_kernel) = jax.value_and_grad(loss, argnums=(0, 1))(x, kernel)
            return (x - 1e-3 * of_x, kernel - 1e-3 * of_kernel), value

        return lax.scan(again, (x, kernel), None, length=3)

    return step


def held(
    step: Callable[..., Any], x: jax.Array, kernel: jax.Array, planner: Any, cluster: str = "8:cpu", **options: Any
) -> list[Any]:
    """The dimension numbers of a planned step, whose results are those of jit."""
    parallel = autopar.parallelize(step, planner=planner, cluster=cluster, **options)
    ours, wanted = parallel(x, kernel), jax.jit(step)(x, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), ours, wanted)
    return list(convolutions(jax.make_jaxpr(parallel)(x, kernel).jaxpr))


@pytest.mark.parametrize(
    ("layouts", "loop"), half([*LAST.values(), *FIRST.values(), *MIXED.values()], (False, True)), ids=str
)
def test_every_layout_is_brought_into_order(layouts: tuple[str, str, str], loop: bool):
    with jax.enable_x64(True):
        found = held(step_of(convolved(layouts), loop), *shaped(layouts), autopar.DataParallel())
    assert len(found) >= 3  # forward, and a gradient by either
    assert all(map(in_order, found))


APPLIED: tuple[dict[str, Any], ...] = (
    {"window_strides": (2, 1)},
    {"lhs_dilation": (2, 2), "padding": ((1, 2), (2, 1))},
    {"rhs_dilation": (1, 2), "padding": ((2, 1), (0, 3))},
    {"feature_group_count": 2},
    {"feature_group_count": 4},
)
PLANNERS = (autopar.DataParallel(), autopar.Megatron(data=2, tensor=4), autopar.Auto())


@pytest.mark.parametrize(("options", "planner"), each(APPLIED, PLANNERS), ids=str)
def test_strides_dilations_and_groups_in_a_loop(options: dict[str, Any], planner: Any):
    layouts, groups = FIRST[2], options.get("feature_group_count", 1)
    with jax.enable_x64(True):
        found = held(step_of(convolved(layouts, **options), loop=True), *shaped(layouts, groups), planner)
    assert len(found) >= 3
    assert all(map(in_order, found))


SMALL: tuple[tuple[tuple[int, int], tuple[int, int], dict[str, Any]], ...] = (
    ((1, 1), (3, 3), {}),
    ((2, 2), (3, 3), {}),
    ((2, 9), (3, 5), {}),
    ((2, 3), (7, 7), {"window_strides": (2, 1)}),
    ((2, 2), (3, 3), {"padding": ((2, 1), (1, 2)), "lhs_dilation": (2, 2)}),
    ((2, 3), (4, 2), {"padding": ((4, 3), (5, 4)), "rhs_dilation": (2, 3)}),
    ((3, 4), (2, 5), {"padding": ((-1, 0), (3, 1))}),
    ((1, 1), (2, 2), {"padding": ((4, 0), (4, 0)), "window_strides": (6, 6)}),
)
"""Images, kernels that are larger than these along a dimension, and how they are applied."""


@pytest.mark.parametrize(("small", "layouts"), half(SMALL, [LAST[2], FIRST[2]]), ids=str)
def test_an_image_smaller_than_the_kernel_gets_zeros_around_it(
    small: tuple[tuple[int, int], tuple[int, int], dict[str, Any]], layouts: tuple[str, str, str]
):
    image, kernel, options = small
    draw = np.random.default_rng(3).normal
    sizes = {"N": 8, "C": 3, "H": image[0], "W": image[1]}
    window = {"O": 4, "I": 3, "H": kernel[0], "W": kernel[1]}
    with jax.enable_x64(True):
        x = jnp.asarray(draw(size=[sizes[d] for d in layouts[0]]), "float64")
        weights = jnp.asarray(draw(size=[window[d] for d in layouts[1]]), "float64")
        step = step_of(convolved(layouts, **options), loop=False)
        held(step, x, weights, autopar.DataParallel(), batch_argnums=0)
        parallel = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:cpu", batch_argnums=0)
        applied = list(extents(jax.make_jaxpr(parallel)(x, weights).jaxpr))
    assert applied
    assert all(pixels >= count for shapes in applied for pixels, count in zip(*shapes, strict=True))


def extents(jaxpr: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The pixels of the image and the taps of the kernel of every convolution of a program whose features are last."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            images, kernel = (v.aval.shape for v in equation.invars)
            yield images[1:-1], kernel[:-2]
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from extents(inner)


def test_microbatches_and_rows_that_vmap_adds():
    layouts = MIXED[2]
    one = convolved(layouts)

    def loss(kernels: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(one, in_axes=(1, 0))(x, kernels) ** 2)

    def step(kernels: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(kernels, x)
        return kernels - 1e-3 * gradients, value

    with jax.enable_x64(True):
        x, kernel = shaped(layouts)
        kernels, xs = jnp.stack([kernel, kernel + 0.1]), jnp.stack([x, x + 0.2], axis=1)
        rows = held(step, kernels, xs, autopar.Auto())
        x, kernel = shaped(LAST[2])
        plain = held(
            lambda kernel, x: jax.value_and_grad(lambda k: jnp.sum(convolved(LAST[2])(x, k) ** 2))(kernel)[::-1],
            kernel,
            x,
            autopar.DataParallel(),
            microbatches=2,
        )
    assert all(map(in_order, (*rows, *plain)))


def test_elsewhere_a_convolution_stays_as_it_was_written():
    layouts = FIRST[2]
    with jax.enable_x64(True):
        found = held(step_of(convolved(layouts), loop=True), *shaped(layouts), autopar.DataParallel(), "8:a100-80g")
    assert not any(map(in_order, found))
    assert {tuple(numbers.lhs_spec) for numbers in found} >= {(0, 1, 2, 3)}
