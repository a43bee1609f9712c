"""Gradients of weights that are made of other weights are reduced after the operator that makes them smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend.tracing import trace
from passes.intra_op.sums_in_products import summed_operand
from passes.placement import group
from tests.sample import half

ROWS, LENGTH, WIDTH, RANK = 32, 16, 16, 2  # of which a test plans for 64 times the length and width


def adapted(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    """A frozen weight with what adapts it added to it."""
    a, b = weights
    return jnp.tanh(x @ (base + a @ b))


def normalised(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    """The adapted weight by the norms of its columns."""
    a, b = weights
    adapted = base + a @ b
    return jnp.tanh(x @ (adapted / jnp.sqrt(1.0 + (adapted**2).sum(0))))


def filtered(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    """A long filter of each channel, by its spectrum."""
    length = x.shape[1]
    spectrum = jnp.fft.rfft(weights[0], 2 * length, axis=0) * jnp.fft.rfft(x, 2 * length, axis=1)
    return jnp.tanh(jnp.fft.irfft(spectrum, 2 * length, axis=1)[:, :length] @ base)


def generated(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    """A long filter that a small network makes of positions, and that decays along them."""
    first, second, decay = weights
    positions = jnp.linspace(0.1, 1.0, x.shape[1])[:, None]
    return filtered([jnp.sin(positions @ first) @ second * jnp.exp(-decay * positions)], base, x)


def oscillating(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    """A long filter of damped oscillations, as S4D has it: the gradients of their values at all positions are larger
    than the filter's, and are summed over positions.
    """
    decay, frequency = weights
    rates = 1j * frequency - jnp.exp(decay)
    values = jnp.exp(rates[..., None] * jnp.arange(x.shape[1]))
    return filtered([jnp.einsum("dn,dnt->td", 1 / rates, values).real], base, x)


def sampled(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    """Each row's own entry of a table beside a few that all rows share, as negative samples are."""
    (table,) = weights
    own, shared = table[jnp.argmax(x[:, 0], -1) % LENGTH], table[np.arange(RANK)]
    return jnp.tanh((own[:, None] * x) @ shared.T)


def biased(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    """Attention with a bias for each distance, as T5 and Swin have it."""
    positions = np.arange(x.shape[1])
    distances = np.minimum(np.abs(positions[:, None] - positions), RANK - 1)
    return jax.nn.softmax(x @ base @ x.swapaxes(1, 2) + weights[0][distances]) @ x


def biased_in_loop(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    """Layers in a loop that share such a bias, which is spread before it."""
    positions = np.arange(x.shape[1])
    bias = weights[0][np.minimum(np.abs(positions[:, None] - positions), RANK - 1)]

    def layer(x: jax.Array, _: Any) -> Any:
        return jax.nn.softmax(x @ base @ x.swapaxes(1, 2) + bias) @ x, None

    return jax.lax.scan(layer, x, None, length=2)[0]


def shapes_of(layer: Callable[..., Any]) -> list[tuple[int, ...]]:
    if layer in (biased, biased_in_loop):
        return [(RANK,)]
    if layer is oscillating:
        return [(WIDTH, RANK), (WIDTH, RANK)]
    if layer is generated:
        return [(1, RANK), (RANK, WIDTH), (WIDTH,)]
    return [(LENGTH, WIDTH)] if layer in (filtered, sampled) else [(WIDTH, RANK), (RANK, WIDTH)]


def step_of(layer: Callable[..., Any]) -> Callable[..., Any]:
    def step(weights: Any, base: jax.Array, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(lambda weights: jnp.sum(layer(weights, base, x) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value

    return step


def arguments(layer: Callable[..., Any], dtype: str = "float32") -> tuple[Any, jax.Array, jax.Array]:
    draw = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape) / 4, dtype)

    return [drawn(*shape) for shape in shapes_of(layer)], drawn(WIDTH, WIDTH), drawn(ROWS, LENGTH, WIDTH)


LAYERS = (adapted, normalised, filtered, generated, oscillating, sampled, biased, biased_in_loop)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("options", [{}, {"microbatches": 4}], ids=["whole", "microbatches"])
def test_data_parallelism_reduces_what_is_updated(layer: Callable[..., Any], options: dict[str, Any]):
    """It reduced the frozen weight's gradient, the filter's spectrum, the filter of a network or of oscillations, and
    the bias of pairs.
    """

    def wider(array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([64 * n if n == WIDTH else n for n in array.shape], array.dtype)

    step = autopar.parallelize(step_of(layer), planner=autopar.DataParallel(), cluster="8:a100-80g", **options)
    given = jax.tree.map(wider, arguments(layer))
    sent = sorted((c.kind, c.nbytes) for c in step.plan(*given).collectives for _ in range(c.count))
    of_norms = [given[1].shape[1]] * options.get("microbatches", 1) if layer is normalised else []
    assert sent == sorted(("all_reduce", 4 * size) for size in (1, *of_norms, *(weight.size for weight in given[0])))


@pytest.mark.parametrize(
    ("layer", "options"),
    half(
        LAYERS,
        (
            {"planner": autopar.DataParallel()},
            {"planner": autopar.Zero(3)},
            {"planner": autopar.Megatron(data=2, tensor=4)},
            {"planner": autopar.Auto(mesh={"x": 2, "y": 4})},
            {"planner": autopar.DataParallel(), "microbatches": 2},
        ),
    ),
)
def test_the_step_is_jits(layer: Callable[..., Any], options: dict[str, Any]):
    with jax.enable_x64(True):
        given = arguments(layer, "float64")
        results, expected = autopar.parallelize(step_of(layer), **options)(*given), jax.jit(step_of(layer))(*given)
        for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_microbatches_may_have_a_gradient_in_a_loop():
    """Of each microbatch the inner gradient is a sum that a product turns into the next position."""

    def step(weight: jax.Array, x: jax.Array) -> Any:
        def energy(weight: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(x @ weight) ** 2)

        def loss(weight: jax.Array) -> jax.Array:
            after, _ = jax.lax.scan(lambda x, _: (x - 0.1 * jax.grad(energy, 1)(weight, x), None), x, None, length=3)
            return jnp.sum(after**2)

        value, gradient = jax.value_and_grad(loss)(weight)
        return weight - 0.01 * gradient, value

    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        given = draw.normal(size=(WIDTH, WIDTH)) / 4, draw.normal(size=(ROWS, WIDTH))
        results, expected = autopar.parallelize(step, microbatches=2)(*given), jax.jit(step)(*given)
        for ours, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def products_of_sums(step: Callable[..., Any], *given: Any) -> list[str]:
    """The primitives of a step's operators that may take a sum as it is."""
    graph = trace(step, given, {}).graph
    grouping = group(graph)
    return [node.primitive for i, node in enumerate(graph.nodes) if summed_operand(graph, grouping, i) is not None]


def test_only_what_makes_less_of_a_sum_over_the_batch_takes_it_as_it_is():
    assert products_of_sums(step_of(adapted), *arguments(adapted)) == ["dot_general", "dot_general"]
    assert products_of_sums(step_of(filtered), *arguments(filtered)) == ["fft"]


def test_a_gradient_that_is_needed_whole_is_reduced_once():
    """The frozen weight is updated too, so its gradient is reduced, and what the adapters' are made of with it."""

    def step(weights: Any, x: jax.Array) -> Any:
        gradients = jax.grad(lambda weights: jnp.sum(adapted(weights[:2], weights[2], x) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)

    factors, base, x = arguments(adapted)
    assert products_of_sums(step, [*factors, base], x) == []


def test_a_square_is_not_made_of_summands():
    @jax.custom_vjp
    def made(a: jax.Array, b: jax.Array) -> jax.Array:
        return a @ b

    def backward(factors: Any, gradient: jax.Array) -> Any:
        a, b = factors
        square = gradient * gradient
        return square @ b.T, a.T @ square

    made.defvjp(lambda a, b: (a @ b, (a, b)), backward)

    def layer(weights: Any, base: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ (base + made(*weights)))

    assert products_of_sums(step_of(layer), *arguments(adapted)) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_scaled_gradient_of_a_branch_is_reduced_once_whichever_factor_comes_first(is_first: bool):
    """As an estimate of curvature every few steps (Liu et al. 2024, "Sophia"): of `scale * gradient` only the scale
    could be a sum, and each microbatch reduced the gradient.
    """

    def step(state: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def estimated() -> jax.Array:
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["weight"])
            return gradient * state["scale"] if is_first else state["scale"] * gradient

        latest = jax.lax.cond(state["step"] % 2 == 0, estimated, lambda: state["curvature"])
        curvature = 0.9 * state["curvature"] + 0.1 * latest
        return {**state, "weight": state["weight"] - curvature, "curvature": curvature, "step": state["step"] + 1}

    matrix = jax.ShapeDtypeStruct((512, 512), "float32")
    state = dict.fromkeys(("weight", "scale", "curvature"), matrix) | {"step": jax.ShapeDtypeStruct((), "int32")}
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g", microbatches=4)
    plan = parallel.plan(state, jax.ShapeDtypeStruct((8192, 512), "float32"))
    assert [(c.kind, c.nbytes, c.count) for c in plan.collectives] == [("all_reduce", matrix.size * 4, 1)]
