"""GPT as GPipe's Transformer: the matrix of its softmax is not that of the embedding.

Its parameters say so: 282.2 million are 3 layers of 50.4, an embedding and a softmax of 65.5 each; 785.8 have 13.
Its positions are sinusoids, which have none, and here are learned, as in `models.gpt`: 2.1 million.

Reference: Huang et al., "GPipe" (1811.06965), table 1; tensorflow/lingvo, lingvo/tasks/lm/layers.py
(`GPipeTransformerLm`).
"""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import gpt
from models.layers import NORMAL, cross_entropy, embed_options, precision_options, stack

example_batch = gpt.example_batch


class Transformer(nn.Module):
    """Logits [batch, sequence, vocabulary] of each next token, from tokens int32[batch, sequence]."""

    config: gpt.Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Embed(config.vocab_size, config.hidden, name="embed", **embed_options(config))(tokens)
        positions = self.param(
            "positions", NORMAL, (config.sequence_length, config.hidden), jnp.dtype(config.param_dtype)
        )
        x = stack(gpt.Block, config, x + positions.astype(config.dtype), True)
        x = nn.LayerNorm(name="norm", **precision_options(config))(x)
        return nn.Dense(config.vocab_size, use_bias=False, name="softmax", **precision_options(config))(x)


def init(config: gpt.Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    tokens = jnp.zeros((1, config.sequence_length), dtype=jnp.int32)
    return Transformer(config).init(key, tokens)["params"]


def loss(config: gpt.Config, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar."""
    logits = cast("jax.Array", Transformer(config).apply({"params": params}, batch["inputs"]))
    return cross_entropy(logits, batch["targets"]).mean()
