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
MODELS = {"a": jnp.ones((3, 8, 8)), "b": jnp.ones((3, 8, 8))}
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


def with_samples(w: Any, frozen: Any, tokens: jax.Array, key: jax.Array) -> Any:
    """Answers that a loop samples, through which a key goes beside the tokens, and weights to be held against."""

    def sampled(_: int, carry: Any) -> Any:
        tokens, key = carry
        key, now = jax.random.split(key)
        return jax.random.categorical(now, scores(w, w["a"][tokens])).astype(tokens.dtype), key

    answers, key = jax.lax.fori_loop(0, 3, sampled, (tokens, key))
    wanted = jax.nn.softmax(scores(frozen, frozen["a"][answers]))
    return descended(lambda w: -(wanted * scores(w, w["a"][answers])).sum(-1).mean(), w), frozen, key


def in_parts(w: Any, rates: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    """Gradients that a loop over parts of the batch adds up."""

    def add(total: Any, part: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(lambda w: losses(w, *part).mean())(w)), None

    parts = x.reshape(2, -1, 8), y.reshape(2, -1)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), parts)
    return jax.tree.map(lambda p, g: p - rates.mean() * g, w, total)


def side_by_side(w: Any, x: jax.Array, y: jax.Array, rates: jax.Array) -> Any:
    """Several models at once, each with a learning rate of its own."""

    def loss(w: Any) -> jax.Array:
        return jax.vmap(losses, (0, None, None))(w, x, y).sum()

    return descended(loss, w, rates[:, None, None])


def side_by_side_on_some(w: Any, x: jax.Array, y: jax.Array, kept: jax.Array) -> Any:
    """Several models at once, each on rows of its own choice."""
    return descended(lambda w: (jax.vmap(losses, (0, None, None))(w, x, y) * kept).sum(), w)


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
    "a loop with a key": (with_samples, (W, W, Y, jax.random.key(0)), ("tokens",)),
    "gradients that are added up": (in_parts, (W, jnp.ones(16), X, Y), ("x", "y")),
    "a rate for each model": (side_by_side, (MODELS, X, Y, jnp.ones(3)), ("x", "y")),
    "rows for each model": (side_by_side_on_some, (MODELS, X, Y, jnp.ones((3, 16))), ("x", "y")),
    "a forward pass": (scores, (W, X), ("x",)),
    "a forward pass of as many rows as features": (scores, (W, SQUARE), ("x",)),
    "tied weights": (tied, (W, Y), ("tokens",)),
}


TABLES = {"table": jnp.ones((64, 8)), "places": jnp.ones((16, 8)), "a": jnp.ones((8, 24)), "b": jnp.ones((24, 8))}
ROW = Y[None]


def spoken(p: Any, tokens: jax.Array, places: jax.Array) -> jax.Array:
    x = p["table"][tokens] + p["places"][places]
    return (x + jnp.tanh(x @ p["a"]) @ p["b"]) @ p["table"].T


def masked(p: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    x = p["table"][tokens]
    return jnp.where(mask, jnp.einsum("bsd,btd->bst", x, x), -9.0) @ x @ p["a"]


def of_all_tokens(p: Any, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Rows go on as one with their tokens, as in a mixture of experts."""
    x = p["table"][tokens] + p["places"][places]
    return x + (jnp.tanh(x.reshape(-1, 8) @ p["a"]) @ p["b"]).reshape(x.shape)


def one_token(p: Any, tokens: jax.Array, place: jax.Array) -> jax.Array:
    x = p["table"][tokens][:, None] + p["places"][place]
    return jnp.tanh(x @ p["a"]) @ p["b"]


def convolved(p: Any, images: jax.Array) -> jax.Array:
    kernels = jax.lax.conv_general_dilated(images, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.tanh(kernels).mean((1, 2)) @ p["head"]


def row_by_row(w: Any, x: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: scores(w, row), x)


def of_the_only_row(w: Any, x: jax.Array) -> jax.Array:
    return scores(w, x[0])


def by_one_expert(experts: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("ecd,edf->ecf", x[None], experts)[0]


def over_time(w: Any, x: jax.Array) -> jax.Array:
    def after(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(x @ w["a"] + state @ w["b"])
        return state, state

    return jax.lax.scan(after, jnp.zeros((len(x), 8)), x.swapaxes(0, 1))[1]


ONE_ROW: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "a forward pass": (scores, (W, X[:1]), ("x",)),
    "tied weights": (tied, (W, ROW), ("tokens",)),
    "positions": (spoken, (TABLES, ROW, jnp.arange(16)), ("tokens",)),
    "weights after it": (
        lambda tokens, p, places: spoken(p, tokens, places),
        (ROW, TABLES, jnp.arange(16)),
        ("tokens",),
    ),
    "a mask of one row": (masked, (TABLES, ROW, jnp.ones((1, 16, 16), bool)), ("tokens", "mask")),
    "all tokens as one": (of_all_tokens, (TABLES, ROW, jnp.arange(16)), ("tokens",)),
    "an image": (
        convolved,
        ({"k": jnp.ones((1, 1, 3, 8)), "head": jnp.ones((8, 8))}, jnp.ones((1, 8, 8, 3))),
        ("images",),
    ),
    "a loop over rows": (row_by_row, (W, X[:1, None]), ("x",)),
    "the row without its dimension": (of_the_only_row, (W, X[None]), ("x",)),
    "a loop over time": (over_time, (W, X[None]), ("x",)),
    "a weight for each class": (with_class_weights, (W, X[:1], Y[:1], jnp.ones(8)), ("x", "y")),
}
"""Of these, weights, positions or classes were taken for the batch."""

MORE_ROWS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "a mask for all": (masked, (TABLES, Y[:8].reshape(2, 4), jnp.ones((1, 4, 4), bool)), ("tokens",)),
    "one token a row at one position": (one_token, (TABLES, Y, jnp.arange(1)), ("tokens",)),
    "one expert": (by_one_expert, (jnp.ones((1, 8, 8)), X), ("x",)),
    "one expert after it": (lambda x, experts: by_one_expert(experts, x), (X, jnp.ones((1, 8, 8))), ("x",)),
    "an image through a kernel of one pixel": (
        convolved,
        ({"k": jnp.ones((1, 1, 3, 8)), "head": jnp.ones((8, 8))}, jnp.ones((2, 8, 8, 3))),
        ("images",),
    ),
}
"""Of these, something else than the batch has one row."""

CASES |= {f"one row: {name}": case for name, case in ONE_ROW.items()}
CASES |= {f"more rows: {name}": case for name, case in MORE_ROWS.items()}


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
