"""GPT with the kernels of Megatron-LM, which keep of a layer for its backward pass what fused kernels keep.

Norms keep their input, GELU its input, softmax its half-precision result, dropout a mask of a byte an element: 34 + 5 a
s / h bytes for each of s b h elements (a heads, s tokens, b sequences, h features), where `models.gpt` keeps each step
of these. A tenth of scores, of both branches of a layer and of embeddings is dropped out, by default there, too. Masks
follow from what they are of, in place of a generator whose numbers never leave the kernel: memory and time are those.

Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from models import gpt
from models.layers import at_least_float32, causal, cross_entropy

DROPOUT = 0.1
"""The probability that an element is dropped out: Megatron-LM's default, of attention and of hidden states."""

BOUND = 4.0
"""The size from which an element is dropped here. A number; how many are beyond it costs nothing."""

EPSILON = 1e-5
"""The least variance of a norm, as in Megatron-LM."""

init, example_batch = gpt.init, gpt.example_batch


def loss(config: gpt.Config, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar; parameters are those of `models.gpt` as one loop."""
    return mean_loss(config, params, batch, _block, _dropped)


def mean_loss(
    config: gpt.Config,
    params: Any,
    batch: dict[str, jax.Array],
    block: Callable[[Any, jax.Array], jax.Array],
    drop: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """The loss of a GPT of such blocks, (layer's parameters, [batch, sequence, hidden]) -> the same; `drop` acts on the
    embeddings.
    """
    embedding = params["embed"]["embedding"]
    x = drop(embedding[batch["inputs"]] + params["positions"])
    block = jax.checkpoint(block, prevent_cse=False) if config.remat else block
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["Block"])
    logits = jnp.einsum("bsh,vh->bsv", norm(params["norm"], x), embedding)
    return cross_entropy(logits, batch["targets"]).mean()


def _block(layer: Any, x: jax.Array) -> jax.Array:
    """Attention, then MLP, each normalised before and added to its input: [batch, sequence, hidden] -> the same."""
    attention, mlp = layer["attention"], layer["mlp"]
    qkv = jnp.einsum("bsh,htnd->bstnd", norm(layer["attention_norm"], x), attention["qkv"]["kernel"])
    query, key, value = jnp.moveaxis(qkv + attention["qkv"]["bias"], 2, 0)
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key)
    weights = _dropped(_softmax(scores, query.shape[-1] ** -0.5))
    mixed = jnp.einsum("bnqk,bknd->bqnd", weights, value)
    x = x + _dropped(jnp.einsum("bsnd,ndh->bsh", mixed, attention["out"]["kernel"]) + attention["out"]["bias"])
    up = jnp.einsum("bsh,hm->bsm", norm(layer["mlp_norm"], x), mlp["up"]["kernel"])
    down = jnp.einsum("bsm,mh->bsh", gelu(up, mlp["up"]["bias"]), mlp["down"]["kernel"])
    return x + _dropped(down + mlp["down"]["bias"])


@partial(jax.checkpoint, prevent_cse=False)
def norm(params: Any, x: jax.Array) -> jax.Array:
    """`x` with mean 0 and variance 1 in float32, scaled and shifted, in its own dtype."""
    wide = at_least_float32(x)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + EPSILON)
    return (scaled * params["scale"] + params["bias"]).astype(x.dtype)


@partial(jax.checkpoint, prevent_cse=False)
def gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(x + bias)


def _dropped(x: jax.Array) -> jax.Array:
    """`x` with elements dropped out, the others larger in turn."""
    stays = abs(jax.lax.stop_gradient(x)) < BOUND
    return jax.lax.select(stays, x * (1 / (1 - DROPOUT)), jnp.zeros_like(x))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(scores: jax.Array, scale: float) -> jax.Array:
    """The softmax of scaled [..., query, key] over the keys up to each query, in the dtype of `scores`."""
    wide = jnp.where(causal(scores.shape[-1]), at_least_float32(scores) * scale, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(wide).astype(scores.dtype)


def _softmax_forward(scores: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    weights = cast("jax.Array", _softmax(scores, scale))
    return weights, weights


def _softmax_backward(scale: float, weights: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    wide, above = at_least_float32(weights), at_least_float32(gradient)
    inner = (wide * above).sum(-1, keepdims=True)
    return ((wide * (above - inner) * scale).astype(weights.dtype),)


_softmax.defvjp(_softmax_forward, _softmax_backward)
