"""The adapters of docs/coming-from.md for code that was written for other wrappers, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
BATCH = jax.random.normal(jax.random.key(0), (16, 8))
OPTIMIZER = optax.sgd(0.1)


def device_step(weight: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One device's part of a step under `pmap`."""
    loss, grads = jax.value_and_grad(lambda weight: jnp.mean((rows @ weight - rows) ** 2))(weight)
    return weight - 0.1 * jax.lax.pmean(grads, "batch"), jax.lax.pmean(loss, "batch")


def update(weight: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grads = jax.value_and_grad(lambda weight: jnp.mean((batch @ weight - batch) ** 2))(weight)
    return weight - 0.1 * grads, loss


def evaluate(weight: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ weight - batch) ** 2)


def adapted(mark: str, name: str = "train_step", **given: Any) -> Any:
    """The step of this name that the page's only block with this text defines."""
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if mark in block]
    names = {"autopar": autopar, "jax": jax, "jnp": jnp, "nnx": nnx, "eqx": eqx, "optimizer": OPTIMIZER}
    names |= {"device_step": device_step, "update": update, "P": P, "mesh": Mesh(np.array(jax.devices()), ("data",))}
    names |= {"evaluate": evaluate, **given}
    exec(block, names)
    return names[name]


def test_pmap():
    weight, rows = jnp.stack([jnp.eye(8) / 2] * 8), BATCH.reshape(8, 2, 8)
    wanted = jax.pmap(device_step, axis_name="batch")(weight, rows)
    for mine, theirs in zip(adapted("pmap")(weight, rows), wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mark", ["nnx", "update, donate"])
def test_steps_for_one_program(mark: str):
    if mark == "nnx":
        model = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
        before = jnp.array(model.kernel[...])
        loss = adapted("nnx.value_and_grad")(model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param), BATCH)
        after = model.kernel[...]
    else:
        before = jnp.eye(8) / 2
        after, loss = adapted(mark)(before + 0, BATCH)
    wanted, value = jax.jit(update)(before, BATCH)
    np.testing.assert_allclose(after, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, value, rtol=1e-5)


def test_equinox():
    model = eqx.nn.MLP(8, 8, 4, 1, activation=jax.nn.relu, key=jax.random.key(1))
    state, step, plain = OPTIMIZER.init(eqx.filter(model, eqx.is_array)), adapted("eqx.apply_updates"), model

    def loss_of(model: eqx.Module) -> jax.Array:
        return jnp.mean((jax.vmap(model)(BATCH) - BATCH) ** 2)

    for _ in range(2):
        wanted, grads = eqx.filter_value_and_grad(loss_of)(plain)
        plain = eqx.apply_updates(plain, jax.tree.map(lambda g: -0.1 * g, grads))
        model, state, loss = step(model, state, BATCH)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert model.activation is plain.activation
    np.testing.assert_allclose(model.layers[0].weight, plain.layers[0].weight, rtol=1e-5, atol=1e-6)


def test_evaluation():
    step = adapted("update, donate")
    weight, _ = step(jnp.eye(8) / 2, BATCH)
    eval_step = adapted("follow=", "eval_step", train_step=step)
    np.testing.assert_allclose(eval_step(weight, BATCH), jax.jit(evaluate)(np.asarray(weight), BATCH), rtol=1e-5)
    assert eval_step.placement(weight, BATCH)[0][0].sharding.is_equivalent_to(weight.sharding, 2)
