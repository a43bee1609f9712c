"""Weights that a step reads and does not update: ZeRO-3 cuts them with the parameters, Megatron with the matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.sample import slow

WIDTH, RANK, ROWS = 32, 4, 16
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)

Base = list[tuple[jax.Array, jax.Array]]


def forward(adapters: Any, base: Base, x: jax.Array) -> jax.Array:
    """Residual blocks with adapters of a low rank beside their first product."""
    for (down, up), (first, second) in zip(adapters, base, strict=True):
        x = x + jnp.tanh(x @ first.astype(x.dtype) + (x @ down) @ up) @ second.astype(x.dtype)
    return x


def adapt(state: Any, base: Base, x: jax.Array) -> Any:
    adapters, moments = state
    loss, gradients = jax.value_and_grad(lambda a: (forward(a, base, x) ** 2).sum())(adapters)
    updates, moments = OPTIMIZER.update(gradients, moments, adapters)
    return (optax.apply_updates(adapters, updates), moments), loss


def distill(params: Base, teacher: Base, x: jax.Array) -> Any:
    """A step towards what another network says, each of whose products is one of weights that stay."""
    none = [(jnp.zeros((WIDTH, RANK)), jnp.zeros((RANK, 4 * WIDTH)))] * len(params)
    target = forward(none, teacher, x)
    gradients = jax.grad(lambda p: ((forward(none, p, x) - target) ** 2).sum())(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)


def base_of(key: jax.Array, dtype: Any = jnp.float32) -> Base:
    draws = jax.random.normal(key, (2, 2, WIDTH, 4 * WIDTH)) / 16
    if dtype == jnp.int8:
        draws = jnp.round(draws * 16)
    return [(first.astype(dtype), second.T.astype(dtype)) for first, second in draws]


def adapting(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    adapters = [(jax.random.normal(keys[0], (WIDTH, RANK)), jnp.zeros((RANK, 4 * WIDTH)))] * 2
    return (adapters, OPTIMIZER.init(adapters)), base_of(keys[1], dtype), jax.random.normal(keys[2], (ROWS, WIDTH))


def distilling() -> tuple[Any, ...]:
    first, second, third = jax.random.split(jax.random.key(1), 3)
    return base_of(first), base_of(second), jax.random.normal(third, (ROWS, WIDTH))


STEPS = {
    "adapters": (adapt, adapting(), "base"),
    "adapters of quantized weights": (adapt, adapting(jnp.int8), "base"),
    "a teacher": (distill, distilling(), "teacher"),
}


@pytest.mark.parametrize("name", [slow("adapters"), "adapters of quantized weights", slow("a teacher")])
def test_zero_cuts_weights_that_are_not_updated(name: str):
    step, args, argument = STEPS[name]
    compiled = autopar.parallelize(step, planner=autopar.Zero(3)).lower(*args).compile()
    compiled.verify().check()
    specs = dict(zip(compiled.plan.input_names, compiled.plan.inputs, strict=True))
    frozen = [spec for where, spec in specs.items() if where.startswith(argument)]
    assert len(frozen) == 4
    assert not any(spec.is_replicated for spec in frozen)
    for ours, theirs in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, float(jnp.abs(theirs).max())))


def test_megatron_cuts_matrices_that_are_not_updated():
    plan = autopar.parallelize(adapt, planner=autopar.Megatron(data=2, tensor=4)).plan(*adapting())
    specs = dict(zip(plan.input_names, plan.inputs, strict=True))
    frozen = [spec for where, spec in specs.items() if where.startswith("base")]
    assert len(frozen) == 4
    assert all("tensor" in spec.axes for spec in frozen)


def test_a_forward_pass_alone_is_cut_too():
    _, base, x = adapting()
    none = [(jnp.zeros((WIDTH, RANK)), jnp.zeros((RANK, 4 * WIDTH)))] * 2
    plan = autopar.parallelize(forward, planner=autopar.Zero(3)).plan(none, base, x)
    specs = dict(zip(plan.input_names, plan.inputs, strict=True))
    assert not any(spec.is_replicated for spec in specs.values())
    assert specs["x"].dims == (("data",), ())


def test_integers_and_rates_of_updates_stay_whole():
    """Positions, which are integers, and what updates alone read."""

    def step(w: jax.Array, x: jax.Array, places: jax.Array, rates: jax.Array) -> jax.Array:
        return w - rates * jax.grad(lambda w: jnp.tanh(x @ w)[:, places].sum())(w)

    args = jnp.ones((WIDTH, WIDTH)), jnp.ones((64, WIDTH)), jnp.arange(WIDTH // 2), jnp.ones(WIDTH)
    plan = autopar.parallelize(step, planner=autopar.Zero(3)).plan(*args)
    specs = dict(zip(plan.input_names, plan.inputs, strict=True))
    assert specs["places"].is_replicated
    assert specs["rates"].is_replicated
