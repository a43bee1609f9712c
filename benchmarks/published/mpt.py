"""GPT with the kernels of MosaicML's MPT, which keep of a layer for its backward pass what PyTorch's kernels keep.

Norms keep their input, and so does GELU; attention is one kernel, which a plan recognises; nothing is dropped out.
Parameters are in float32, those of `models.gpt`, and are read in the precision of activations.

Reference: mosaicml/llm-foundry, llmfoundry/models/mpt and scripts/train/yamls.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.published.megatron_gpt import gelu, mean_loss, norm
from models import gpt
from models.layers import attend, causal

init, example_batch = gpt.init, gpt.example_batch


def loss(config: gpt.Config, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar; parameters are those of `models.gpt` as one loop."""
    return mean_loss(config, jax.tree.map(lambda x: x.astype(config.dtype), params), batch, _block)


def _block(layer: Any, x: jax.Array) -> jax.Array:
    """Attention, then MLP, each normalised before and added to its input: [batch, sequence, hidden] -> the same."""
    attention, mlp = layer["attention"], layer["mlp"]
    qkv = jnp.einsum("bsh,htnd->bstnd", norm(layer["attention_norm"], x), attention["qkv"]["kernel"])
    query, key, value = jnp.moveaxis(qkv + attention["qkv"]["bias"], 2, 0)
    mixed = attend(query[:, :, :, None], key, value, causal(x.shape[1]))[:, :, :, 0]
    x = x + jnp.einsum("bsnd,ndh->bsh", mixed, attention["out"]["kernel"]) + attention["out"]["bias"]
    up = jnp.einsum("bsh,hm->bsm", norm(layer["mlp_norm"], x), mlp["up"]["kernel"])
    return x + jnp.einsum("bsm,mh->bsh", gelu(up, mlp["up"]["bias"]), mlp["down"]["kernel"]) + mlp["down"]["bias"]
