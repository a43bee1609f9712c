"""Sums over the batch that a loop over layers rounds, as gradients of norms in bfloat16, are rounded after the loop.

So are those of arrays that all layers share: a position bias, or the norm of a network that repeats one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

LAYERS, ROWS, WIDTH = 3, 32, 64
Params = dict[str, jax.Array]


def step_of(wrap: Callable[..., Any], dtype: str) -> Callable[[Params, jax.Array], tuple[Params, jax.Array]]:
    """A step of layers in a loop, each with a norm whose gradient is summed in float32 and rounded to bfloat16."""

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        wide = x.astype(jnp.float32)
        norm = wide * jax.lax.rsqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6)
        norm = norm * layer["scale"].astype(jnp.float32) * jnp.exp(-layer["decay"].astype(jnp.float32))
        return x + jnp.tanh(norm.astype(x.dtype) @ layer["up"]), None

    def step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        def loss(params: Params) -> jax.Array:
            cast = jax.tree.map(lambda w: w.astype(dtype), params)
            y, _ = jax.lax.scan(wrap(block), x.astype(dtype), cast)
            return (y.astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), params, grads), value

    return step


WRAPS = {"plain": lambda block: block, "checkpoint": jax.checkpoint, "jit": jax.jit}


def arrays() -> tuple[Params, jax.Array]:
    draws = np.random.default_rng(0)
    shapes = {"scale": (WIDTH,), "decay": (WIDTH,), "up": (WIDTH, WIDTH)}
    params = {k: jnp.asarray(draws.normal(size=(LAYERS, *s)), jnp.float32) / 4 for k, s in shapes.items()}
    return params, jnp.asarray(draws.normal(size=(ROWS, WIDTH)), jnp.float32)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_step_with_norms_in_bfloat16_is_jits_in_microbatches(wrap: Callable[..., Any]) -> None:
    """Microbatches of it were refused, as each layer rounded a sum over the batch."""
    step, args = step_of(wrap, "bfloat16"), arrays()
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), microbatches=2)
    got, expected = parallel(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3), got, expected)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_gradients_of_norms_are_reduced_once_for_all_layers(wrap: Callable[..., Any]) -> None:
    args = jax.eval_shape(arrays)
    for count in (1, 2):
        parallel = autopar.parallelize(
            step_of(wrap, "bfloat16"), cluster="8:a100-80g", planner=autopar.DataParallel(), microbatches=count
        )
        plan = parallel.plan(*args)
        of_norms = [c for c in plan.collectives if c.nbytes == LAYERS * WIDTH * 4]
        assert sum(c.count for c in of_norms) == 2
        assert not [c for c in plan.collectives if c.nbytes == WIDTH * 4]


def test_a_pipeline_takes_a_loop_over_layers_in_bfloat16() -> None:
    planner = autopar.Pipeline(stages=LAYERS, microbatches=4, submeshes=(1,) * LAYERS)
    plan = autopar.parallelize(step_of(jax.checkpoint, "bfloat16"), cluster="3:a100-80g", planner=planner).plan(
        *jax.eval_shape(arrays)
    )
    assert len(plan.stages) == LAYERS


def test_numbers_of_one_device_are_the_same_with_casts_behind_the_loop() -> None:
    step, args = step_of(jax.checkpoint, "bfloat16"), arrays()
    got = autopar.parallelize(step, planner=autopar.DataParallel(), devices=jax.devices()[:1])(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, jax.jit(step)(*args))


def position_bias(h: jax.Array, layer: Params, shared: Params) -> jax.Array:
    """Attention with logits in float32 and one bias for all layers (T5)."""
    heads = (h @ layer["up"]).reshape(ROWS, 4, -1)
    scores = jnp.einsum("btd,bsd->bts", heads, heads, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores / 4 + shared["bias"].astype(jnp.float32)).astype(h.dtype)
    return h + (weights @ heads).reshape(h.shape)


def repeated(h: jax.Array, layer: Params, shared: Params) -> jax.Array:
    """Two evaluations of one layer with a norm, whose weights are cast for all iterations (Universal Transformer)."""
    for _ in range(2):
        wide = h.astype(jnp.float32)
        norm = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * shared["norm"].astype(jnp.float32)
        h = h + jnp.tanh(norm.astype(h.dtype) @ layer["up"])
    return h


def sharing_step(
    layer_of: Callable[..., jax.Array], wrap: Callable[..., Any]
) -> Callable[[Params, jax.Array], tuple[Params, jax.Array]]:
    """A step of layers in a loop in bfloat16 that share arrays, by gradient descent."""

    def loss(params: Params, x: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        stacks, shared = {"up": cast.pop("up")}, cast
        y, _ = jax.lax.scan(wrap(lambda h, layer: (layer_of(h, layer, shared), None)), x.astype(jnp.bfloat16), stacks)
        return (y.astype(jnp.float32) ** 2).mean()

    def step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def shared_arrays() -> tuple[Params, jax.Array]:
    params, x = arrays()
    draws = np.random.default_rng(1)
    bias, norm = (jnp.asarray(draws.normal(size=size), jnp.float32) for size in ((4, 4), WIDTH))
    return {"up": params["up"], "bias": bias, "norm": norm}, x


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("layer", [position_bias, repeated])
def test_a_step_whose_layers_share_an_array_is_jits_in_microbatches(
    layer: Callable[..., jax.Array], wrap: Callable[..., Any]
) -> None:
    """Microbatches of it were refused, as each layer rounded a sum over the batch and added it up."""
    step, args = sharing_step(layer, wrap), shared_arrays()
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), microbatches=2)
    got, expected = parallel(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3), got, expected)


@pytest.mark.parametrize("layer", [position_bias, repeated])
def test_the_gradient_of_what_layers_share_is_reduced_once_in_the_dtype_of_its_sums(
    layer: Callable[..., jax.Array],
) -> None:
    args, nbytes = jax.eval_shape(shared_arrays), {position_bias: 4 * 4 * 4, repeated: WIDTH * 4}[layer]
    for count in (1, 2):
        parallel = autopar.parallelize(
            sharing_step(layer, jax.checkpoint),
            cluster="8:a100-80g",
            planner=autopar.DataParallel(),
            microbatches=count,
        )
        small = [c for c in parallel.plan(*args).collectives if 4 < c.nbytes <= WIDTH * 4]
        assert [(c.nbytes, c.count) for c in small] == [(nbytes, 1)]
