"""Names that the code blocks of pages use without defining them."""

from __future__ import annotations

from typing import Any

GIVEN = {
    "docs/coming-from.md": """
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P

import autopar

optimizer = optax.sgd(0.1)
mesh = Mesh(np.array(jax.devices()), ("data",))


def device_step(weight, rows):
    loss, grads = jax.value_and_grad(lambda weight: jnp.mean((rows @ weight - rows) ** 2))(weight)
    return weight - 0.1 * jax.lax.pmean(grads, "batch"), jax.lax.pmean(loss, "batch")


def update(weight, batch):
    loss, grads = jax.value_and_grad(lambda weight: jnp.mean((batch @ weight - batch) ** 2))(weight)
    return weight - 0.1 * grads, loss


def evaluate(weight, batch):
    return jnp.mean((batch @ weight - batch) ** 2)
""",
    "docs/how-to/read-a-plan.md": """
import jax
import jax.numpy as jnp

import autopar


@autopar.parallelize(donate_argnums=0)
def train_step(state, batch):
    loss, grad = jax.value_and_grad(lambda weight: jnp.mean((batch @ weight - batch) ** 2))(state["weight"])
    return {"weight": state["weight"] - 0.1 * grad}, loss


state, batch = {"weight": jnp.eye(16)}, jnp.ones((8, 16))
""",
}

LAUNCHED = {
    "docs/processes.md": """
import jax
import jax.numpy as jnp
import numpy as np


@autopar.parallelize(donate_argnums=0)
def train_step(state, batch):
    loss, grad = jax.value_and_grad(lambda weight: jnp.mean((batch @ weight - batch) ** 2))(state["weight"])
    return {"weight": state["weight"] - 0.1 * grad}, loss


def init_fn(key):
    return {"weight": jax.random.normal(key, (16, 16))}


def batches(first):
    return iter([batch] * 2)


key, batch = jax.random.key(0), np.ones((8, 16), "float32")
state_types, batch_types = jax.eval_shape(init_fn, key), jax.ShapeDtypeStruct((8, 16), "float32")
source = [batch] * 4
""",
}
"""Pages whose blocks are one script of several processes, with what stands behind its first block."""


def names_of(page: str) -> dict[str, Any]:
    """The names that a page takes as given, by its path in the repository."""
    names: dict[str, Any] = {}
    exec(GIVEN.get(page, ""), names)
    return names
