"""LLaMA with the kernels of nanotron, which keep of a layer for its backward pass what fused kernels keep.

RMSNorm is one kernel (FlashAttention's) that keeps its input, where `models.llama` keeps its steps in float32; rotary
positions keep nothing; the gate of SwiGLU keeps its input and its result. Attention is FlashAttention's, which a plan
recognises.

Reference: huggingface/nanotron, src/nanotron/models/llama.py and nn/layer_norm.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from models import llama
from models.layers import at_least_float32, attend, causal, cross_entropy

init, example_batch = llama.init, llama.example_batch


def loss(config: llama.Config, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar; parameters are those of `models.llama` as one loop."""
    x = params["embed"]["embedding"][batch["inputs"]]
    x, _ = jax.lax.scan(lambda x, layer: (block(config, layer, x), None), x, params["Block"])
    logits = jnp.einsum("bsh,hv->bsv", norm(params["norm"], x), params["head"]["kernel"])
    return cross_entropy(logits, batch["targets"]).mean()


def block(config: llama.Config, layer: Any, x: jax.Array) -> jax.Array:
    """Attention, then SwiGLU, each normalised before and added to its input: [batch, sequence, hidden] -> the same."""
    attention, mlp = layer["attention"], layer["mlp"]
    y = norm(layer["attention_norm"], x)
    query = jnp.einsum("bsh,hkgd->bskgd", y, attention["query"]["kernel"])
    pair = jnp.einsum("bsh,htkd->bstkd", y, attention["key_value"]["kernel"])
    query, key = (llama.rotate(z, config.rotary_base) for z in (query, pair[:, :, 0]))
    mixed = attend(query, key, pair[:, :, 1], causal(x.shape[1]))
    x = x + jnp.einsum("bskgd,kgdh->bsh", mixed, attention["out"]["kernel"])
    y = norm(layer["mlp_norm"], x)
    gate = jnp.einsum("bsh,hm->bsm", y, mlp["gate"]["kernel"])
    up = jnp.einsum("bsh,hm->bsm", y, mlp["up"]["kernel"])
    return x + jnp.einsum("bsm,mh->bsh", _silu(gate) * up, mlp["down"]["kernel"])


@partial(jax.checkpoint, prevent_cse=False)
def norm(params: Any, x: jax.Array) -> jax.Array:
    """`x` with a mean square of 1 in float32, scaled, in its own dtype."""
    wide = at_least_float32(x)
    scaled = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + llama.NORM_EPSILON)
    return (scaled * params["scale"]).astype(x.dtype)


@partial(jax.checkpoint, prevent_cse=False)
def _silu(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x)
