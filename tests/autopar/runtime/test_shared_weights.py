"""Weights that several stages read: no sum of their gradients is handed from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Megatron, Pipeline
from tests.sample import slow

ROWS, TOKENS, WIDTH, WORDS, LAYERS = 16, 4, 8, 16, 4


def cast_once(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """A language model whose weights are all narrowed at first, as mixed precision is often written; its head is its
    embedding.
    """
    params = jax.tree.map(lambda w: w.astype("bfloat16"), params)
    h = params["embedding"][tokens]
    for w in params["layers"]:
        h = h + jnp.tanh(h @ w)
    logits = (h @ params["embedding"].T).astype("float32")
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).sum()


def biased(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Attention with a bias by distance, which all layers share, as T5's."""
    here = jnp.arange(TOKENS)
    bias = jnp.moveaxis(params["distances"][jnp.abs(here[:, None] - here)], -1, 0)
    h = params["embedding"][tokens]
    for w in params["layers"]:
        scores = jnp.einsum("btd,bsd,hd->bhts", h @ w, h, params["heads"]) + bias
        h = h + jnp.einsum("bhts,bsd->btd", jax.nn.softmax(scores), h) / 2
    return jnp.sum((h - params["embedding"][targets]) ** 2)


def arguments() -> Any:
    draws = np.random.default_rng(0)
    shapes = {"embedding": (WORDS, WIDTH), "distances": (TOKENS, 2), "heads": (2, WIDTH)}
    params: Any = {name: jnp.asarray(draws.normal(size=shape) / 3) for name, shape in shapes.items()}
    params["layers"] = [jnp.asarray(draws.normal(size=(WIDTH, WIDTH)) / 3) for _ in range(LAYERS)]
    return params, *(jnp.asarray(draws.integers(0, WORDS, (ROWS, TOKENS))) for _ in range(2))


def train(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, targets)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradients), value

    return step


@pytest.mark.parametrize("loss", [cast_once, biased])
@pytest.mark.parametrize(
    "planner",
    [
        Pipeline(stages=4, microbatches=4),
        slow(Pipeline(stages=2, microbatches=2, interleave=2, schedule="interleaved")),
        Pipeline(stages=2, microbatches=4, schedule="zero-bubble-h1"),
        slow(Megatron(data=2, tensor=1, pipeline=4, microbatches=4, zero=1)),
    ],
)
def test_stages_hand_on_activations_alone_and_take_jits_step(planner: Any, loss: Callable[..., jax.Array]) -> None:
    with jax.enable_x64():
        given, step = arguments(), train(loss)
        parallel = autopar.parallelize(step, planner=planner)
        wanted, (got, plan) = jax.jit(step)(*given), (parallel(*given), parallel.plan(*given))
    is_narrow = loss is cast_once
    activations = ROWS // plan.microbatches * TOKENS * WIDTH * (2 if is_narrow else 8)
    assert max(plan.sent_nbytes) <= 2 * activations
    assert not any(c.count > 1 and c.nbytes >= WORDS * WIDTH for stage in plan.stages for c in stage.collectives)
    tolerance = 2e-2 if is_narrow else 1e-10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, wanted)
