"""Small train steps with their arguments and optimizers, for tests of pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar
from autopar import Pipeline
from autopar.runtime import build
from passes.transforms import stages

KEY = jax.random.key(0)


def mlp(layers: int = 4, rows: int = 16) -> tuple[Any, Any]:
    keys = jax.random.split(KEY, layers + 2)
    params = [jax.random.normal(k, (8, 8)) / 3 for k in keys[:layers]]
    return params, {"x": jax.random.normal(keys[-2], (rows, 8)), "y": jax.random.normal(keys[-1], (rows, 8))}


def predict(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def step_of(
    loss: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation
) -> Callable[[Any, Any], Any]:
    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value, "norm": optax.tree.norm(grads)}

    return step


def squared(params: Any, batch: Any) -> jax.Array:
    return jnp.sum((predict(params, batch["x"]) - batch["y"]) ** 2)


def tied(params: Any, batch: Any) -> jax.Array:
    """The first matrix is the last one too."""
    return jnp.mean((predict([*params, params[0].T], batch["x"]) - batch["y"]) ** 2)


def dropped(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w) * jax.random.bernoulli(jax.random.fold_in(KEY, i), 0.8, (x.shape[0], 8))
    return jnp.sum((x - batch["y"]) ** 2)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw+clip": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
}


def residual(vocabulary: int = 96, width: int = 8, layers: int = 6) -> tuple[Callable[..., Any], Any]:
    """A step of a language model whose embedding is also its head, and its arguments."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        h = params["embedding"][tokens]
        for up, down in params["blocks"]:
            h = h + jnp.tanh(h @ up) @ down
        log_p = jax.nn.log_softmax(h @ params["embedding"].T)
        return -jnp.take_along_axis(log_p, tokens[..., None], -1).mean()

    def step(params: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(KEY, layers + 1)
    blocks = [(jax.random.normal(k, (width, 4 * width)), jax.random.normal(k, (4 * width, width))) for k in keys[1:]]
    params = {"embedding": jax.random.normal(keys[0], (vocabulary, width)), "blocks": blocks}
    return step, (params, jnp.arange(64).reshape(16, 4) % vocabulary)


def written(planner: Pipeline, loss: Callable[..., jax.Array] = squared, layers: int = 4) -> Any:
    """(plan, cut, program) of a small step on four devices."""
    params, batch = mlp(layers)
    step = step_of(loss, OPTIMIZERS["adamw+clip"])
    parallel = autopar.parallelize(step, planner=planner, devices=jax.devices()[:4])
    arguments = (params, OPTIMIZERS["adamw+clip"].init(params)), batch
    plan = parallel.plan(*arguments)
    traced = parallel.trace(*arguments)
    cut = stages.cut(traced.graph, plan.firsts, traced.state_pairs)
    return plan, cut, build(traced, plan, cut, jax.devices()[:4])
