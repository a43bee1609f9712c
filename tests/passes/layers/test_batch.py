"""The batch of a step: found by what its dimension runs through, however its arguments are shaped and ordered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from passes.layers import taken_for

W = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
X, Y = jnp.ones((16, 8)), jnp.zeros(16, "int32")
SQUARE = jnp.ones((8, 8))


def scores(w: Any, x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(jnp.tanh(x @ w["a"]) @ w["b"])


def losses(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return -scores(w, x)[jnp.arange(len(y)), y]


def descended(loss: Callable[[Any], jax.Array], w: Any, rate: Any = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, w, jax.grad(loss)(w))


def with_key(w: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return descended(lambda w: losses(w, x * kept, y).mean(), w)


def with_rates(w: Any, x: jax.Array, y: jax.Array, rates: jax.Array) -> Any:
    return descended(lambda w: losses(w, x, y).mean(), w, rates[1])


def with_class_weights(w: Any, x: jax.Array, y: jax.Array, weights: jax.Array) -> Any:
    return descended(lambda w: -(scores(w, x) * jax.nn.one_hot(y, 8) * weights).sum(-1).mean(), w)


def with_mask(w: Any, tokens: jax.Array, places: jax.Array, mask: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        h = w["a"][tokens] + w["b"][places]
        weights = jax.nn.softmax(jnp.where(mask, jnp.einsum("bsd,btd->bst", h, h), -9.0))
        return jnp.einsum("bst,btd->bsd", weights, h).mean()

    return descended(loss, w)


def in_one(data: Any) -> Any:
    return data | {"w": descended(lambda w: losses(w, data["x"], data["y"]).mean(), data["w"])}


def with_more(w: Any, x: jax.Array, y: jax.Array, unlabelled: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        return losses(w, x, y).mean() + jnp.exp(scores(w, unlabelled)).max(-1).mean()

    return descended(loss, w)


def two_towers(w: Any, users: jax.Array, items: jax.Array) -> Any:
    """Every row of one tower compared with every one of the other, of which the own is the right one."""

    def loss(w: Any) -> jax.Array:
        left, right = jnp.tanh(w["a"][users] @ w["a"]), jnp.tanh(w["b"][items] @ w["b"])
        return -jnp.take_along_axis(jax.nn.log_softmax(left @ right.T), jnp.arange(len(users))[:, None], 1).mean()

    return descended(loss, w)


def with_queue(w: Any, x: jax.Array, queue: jax.Array) -> Any:
    """As many keys of earlier batches as rows, which nothing is computed of."""
    return descended(lambda w: jax.nn.logsumexp(jnp.tanh(x @ w["a"]) @ w["b"] @ queue.T, 1).mean(), w)


def with_frozen_weights(w: Any, frozen: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> Any:
    """Weights that are not updated, adapted as LoRA does or scaled as quantized ones are."""

    def adapted(w: Any) -> Any:
        return {"a": frozen["a"] + w["a"] @ w["b"], "b": frozen["b"].astype("float32") * frozen["scales"]}

    return descended(lambda w: losses(adapted(w), x, y).sum(), w)


def in_parts(w: Any, rates: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    """Gradients that a loop over parts of the batch adds up."""

    def add(total: Any, part: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(lambda w: losses(w, *part).mean())(w)), None

    parts = x.reshape(2, -1, 8), y.reshape(2, -1)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), parts)
    return jax.tree.map(lambda p, g: p - rates.mean() * g, w, total)


def tied(w: Any, tokens: jax.Array) -> jax.Array:
    return jnp.tanh(w["a"][tokens] @ w["b"]) @ w["a"].T


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "a legacy key": (with_key, (W, X, Y, jax.random.PRNGKey(0)), ("x", "y")),
    "learning rates": (with_rates, (W, X, Y, jnp.ones(3)), ("x", "y")),
    "as many learning rates as rows": (with_rates, (W, X, Y, jnp.ones(16)), ("x", "y")),
    "a weight for each class": (with_class_weights, (W, X, Y, jnp.ones(8)), ("x", "y")),
    "positions and a mask, as many as rows": (
        with_mask,
        (W, Y[:8, None] + Y[:8], jnp.arange(8), jnp.tril(SQUARE) > 0),
        ("tokens",),
    ),
    "state and batch in one": (in_one, ({"w": W, "x": X, "y": Y},), ("data['x']", "data['y']")),
    "as many rows as features": (with_rates, (W, SQUARE, Y[:8], jnp.ones(8)), ("x", "y")),
    "two batches": (with_more, (W, X, Y, jnp.ones((48, 8))), ("x", "y", "unlabelled")),
    "two towers": (two_towers, (W, Y[:8], Y[:8]), ("users", "items")),
    "a queue of as many keys as rows": (with_queue, (W, X, X), ("x",)),
    "weights that are adapted or scaled": (
        with_frozen_weights,
        (
            {"a": jnp.ones((8, 2)), "b": jnp.ones((2, 8))},
            {"a": W["a"], "b": jnp.ones((8, 8), "int8"), "scales": jnp.ones((8, 1))},
            X,
            Y,
        ),
        ("x", "y"),
    ),
    "gradients that are added up": (in_parts, (W, jnp.ones(16), X, Y), ("x", "y")),
    "a forward pass": (scores, (W, X), ("x",)),
    "a forward pass of as many rows as features": (scores, (W, SQUARE), ("x",)),
    "tied weights": (tied, (W, Y), ("tokens",)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_batch_runs_through_the_work_of_the_forward_pass(name: str):
    step, arguments, wanted = CASES[name]
    traced = autopar.parallelize(step).step(*arguments)
    assert tuple(traced.graph.input_names[i] for i in traced.batch) == wanted


def test_the_batch_is_what_the_user_says():
    def step(w: Any, x: jax.Array, y: jax.Array, rates: jax.Array) -> Any:
        return with_rates(w, x, y, rates)

    named = autopar.parallelize(step, batch_argnums=(1,), batch_argnames=("y",)).step(W, X, Y, rates=jnp.ones(16))
    assert [named.graph.input_names[i] for i in named.batch] == ["x", "y"]
    assert taken_for(named.graph, named.batch) == "taken for the batch: x float32[16,8], y int32[16]"
    path = autopar.parallelize(in_one, batch_argnames="data['x']").step({"w": W, "x": X, "y": Y})
    assert [path.graph.input_names[i] for i in path.batch] == ["data['x']"]
