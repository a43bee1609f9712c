"""The phases of nodes, forward, backward and apply, whichever library wrote the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from passes.ir import Graph, Node, phase

X = np.ones((8, 4), np.float32)
WEIGHTS = {"a": np.ones((4, 16), np.float32), "b": np.ones((16, 4), np.float32)}


def predict(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["a"]) @ params["b"]


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def plain(params: Any, x: jax.Array) -> Any:
    return sgd(params, jax.grad(lambda p: jnp.sum(predict(p, x) ** 2))(params))


def with_aux(params: Any, x: jax.Array) -> Any:
    def loss(p: Any) -> Any:
        return jnp.sum(predict(p, x) ** 2), predict(p, x)

    (value, out), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return sgd(params, grads), value, out.mean()


def with_custom_vjp(params: Any, x: jax.Array) -> Any:
    return sgd(params, jax.grad(lambda p: jnp.sum(doubled(predict(p, x)) ** 2))(params))


def of_vmap(params: Any, x: jax.Array) -> Any:
    each = jax.vmap(jax.grad(lambda p, row: jnp.sum(predict(p, row[None]) ** 2)), in_axes=(None, 0))(params, x)
    return sgd(params, jax.tree.map(lambda g: g.mean(0), each))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, use_bias=False)(jnp.tanh(nn.Dense(16, use_bias=False)(x)))


def linen(params: Any, x: jax.Array) -> Any:
    return sgd(params, jax.grad(lambda p: jnp.sum(Linen().apply(p, x) ** 2))(params))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(4, 16, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(16, 4, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


def of_nnx() -> tuple[Callable[..., Any], Any]:
    definition, params = nnx.split(Nnx(nnx.Rngs(0)))

    def step(params: Any, x: jax.Array) -> Any:
        return sgd(params, jax.grad(lambda p: jnp.sum(nnx.merge(definition, p)(x) ** 2))(params))

    return step, params


def equinox() -> tuple[Callable[..., Any], Any]:
    model = eqx.nn.MLP(4, 4, 16, 1, activation=jnp.tanh, use_bias=False, use_final_bias=False, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)

    def step(params: Any, x: jax.Array) -> Any:
        return sgd(params, jax.grad(lambda p: jnp.sum(jax.vmap(eqx.combine(p, static))(x) ** 2))(params))

    return step, params


CASES: dict[str, Callable[[], tuple[Callable[..., Any], Any]]] = {
    "plain": lambda: (plain, WEIGHTS),
    "has_aux": lambda: (with_aux, WEIGHTS),
    "custom_vjp": lambda: (with_custom_vjp, WEIGHTS),
    "vmap": lambda: (of_vmap, WEIGHTS),
    "linen": lambda: (linen, jax.eval_shape(Linen().init, jax.random.key(0), X)),
    "nnx": of_nnx,
    "equinox": equinox,
}
"""Makers of a step and its parameters: what collects tests need not build models."""


def nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.subgraphs:
            yield from nodes(body)


def products(step: Callable[..., Any], *args: Any) -> Counter[str]:
    """Matrix products by phase."""
    graph = autopar.parallelize(step, cluster="2:a100-80g").trace(*args).graph
    return Counter(phase(node) for node in nodes(graph) if node.primitive == "dot_general")


@pytest.mark.parametrize("name", CASES)
def test_two_products_forward_three_backward(name: str):
    step, params = CASES[name]()
    products_found = products(step, params, X)
    assert products_found["forward"] == (4 if name == "has_aux" else 2)
    assert products_found["backward"] == 3
    assert products_found["apply"] == 0


def test_recomputation_is_backward():
    def step(params: Any, x: jax.Array) -> Any:
        return sgd(params, jax.grad(lambda p: jnp.sum(jax.checkpoint(predict)(p, x) ** 2))(params))

    assert products(step, WEIGHTS, X) == {"forward": 2, "backward": 4}


def test_loops_over_layers():
    def step(stack: jax.Array, x: jax.Array) -> Any:
        def loss(stack: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0])

        return stack - 0.1 * jax.grad(loss)(stack)

    assert products(step, jnp.ones((3, 4, 4)), X) == {"forward": 1, "backward": 2}


def test_without_a_gradient_all_is_apply():
    assert products(predict, WEIGHTS, X) == {"apply": 2}
