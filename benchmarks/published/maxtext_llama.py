"""LLaMA as MaxText trains it: parameters in float32 read in bfloat16, and each layer recomputed, all of it or all but
what products with weights make (its remat policies `full` and `minimal`).

Reference: AI-Hypercomputer/maxtext, MaxText/layers/models.py (`get_remat_policy`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.published import nanotron_llama
from models import llama
from models.layers import cross_entropy

init, example_batch = llama.init, llama.example_batch


def loss(config: llama.Config, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar; parameters are those of `models.llama` as one loop."""
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
    kept = None if config.remat else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    block = jax.checkpoint(partial(nanotron_llama.block, config), prevent_cse=False, policy=kept)
    x = params["embed"]["embedding"][batch["inputs"]]
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["Block"])
    logits = jnp.einsum("bsh,hv->bsv", nanotron_llama.norm(params["norm"], x), params["head"]["kernel"])
    return cross_entropy(logits, batch["targets"]).mean()
