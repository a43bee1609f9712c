"""BERT: post-layer-norm encoder blocks that see both ways, trained to restore masked tokens.

Next-sentence prediction, which later work dropped, is left out; the segments it needs are kept.

**Reference**: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (2019),
sections 3 and 3.1.
"""

from dataclasses import dataclass
from typing import Any, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import (
    MLP,
    NORMAL,
    Attention,
    attention_parameters,
    cross_entropy,
    dense_options,
    embed_options,
    masked_mean,
    mlp_parameters,
    precision_options,
    stack,
    verify,
    verify_divides,
    verify_preset,
    verify_tokens,
)

# name -> hidden, layers, heads
SIZES = {"base": (768, 12, 12), "large": (1024, 24, 16)}

PRESETS = ("tiny", *SIZES)

SEGMENTS = 2
MASK_TOKEN = 0
MASKED_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a BERT and the precision it runs in.

    `dtype` is what activations are computed in, `param_dtype` what parameters are kept in; float64 needs
    `jax_enable_x64`. With `remat`, each block's backward pass recomputes the block. With `scan_layers`, the blocks are
    one loop over stacked parameters.

    Raises ValueError if `heads` does not divide `hidden`, a size is not positive, or a dtype is not one of
    `models.layers.DTYPES`.
    """

    vocab_size: int
    sequence_length: int
    hidden: int
    layers: int
    heads: int
    mlp_factor: int = 4
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False
    scan_layers: bool = False

    def __post_init__(self) -> None:
        verify(self)
        verify_divides(self, "heads", "hidden")

    @classmethod
    def tiny(cls) -> Self:
        """A byte-level model of 0.9 million parameters; every dimension is a multiple of 8, for 8 devices."""
        return cls(vocab_size=256, sequence_length=128, hidden=128, layers=4, heads=8)

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration called `name` in `PRESETS`; `dataclasses.replace` changes a field of it.

        Raises ValueError, with the names there are, for any other name.
        """
        verify_preset("BERT", name, PRESETS)
        if name == "tiny":
            return cls.tiny()
        hidden, layers, heads = SIZES[name]
        return cls(vocab_size=30522, sequence_length=512, hidden=hidden, layers=layers, heads=heads)

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads


class Block(nn.Module):
    """Attention, then MLP, each added to its input and normalised after: [batch, sequence, hidden] -> the same."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.config.dropout, deterministic=self.deterministic)
        y = drop(Attention(self.config, self.deterministic, name="attention")(x))
        x = nn.LayerNorm(name="attention_norm", **precision_options(self.config))(x + y)
        y = drop(MLP(self.config, name="mlp")(x))
        return nn.LayerNorm(name="mlp_norm", **precision_options(self.config))(x + y)


class BERT(nn.Module):
    """Logits [batch, sequence, vocabulary] of every token, from tokens and segments, each int32[batch, sequence]."""

    config: Config
    deterministic: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        config, param_dtype = self.config, jnp.dtype(self.config.param_dtype)
        embed = nn.Embed(config.vocab_size, config.hidden, name="embed", **embed_options(config))
        embed_segment = nn.Embed(SEGMENTS, config.hidden, name="embed_segment", **embed_options(config))
        positions = self.param("positions", NORMAL, (config.sequence_length, config.hidden), param_dtype)
        x = embed(tokens) + embed_segment(segments) + positions.astype(config.dtype)
        x = nn.LayerNorm(name="embed_norm", **precision_options(config))(x)
        x = nn.Dropout(config.dropout, deterministic=self.deterministic)(x)

        x = stack(Block, config, x, self.deterministic)

        x = nn.gelu(nn.Dense(config.hidden, name="head", **dense_options(config))(x))
        x = nn.LayerNorm(name="head_norm", **precision_options(config))(x)
        bias = self.param("head_bias", nn.initializers.zeros, (config.vocab_size,), param_dtype)
        return embed.attend(x) + bias.astype(config.dtype)


def init(config: Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    tokens = jnp.zeros((1, config.sequence_length), dtype=jnp.int32)
    return BERT(config).init(key, tokens, tokens)["params"]


def logits(
    config: Config, params: Any, inputs: jax.Array, segments: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Logits [batch, sequence, vocabulary] of every token, from `inputs` and `segments`, each int32[batch, sequence].

    Dropout acts only if there is a `key` for it. Raises ValueError if `inputs` has another sequence length than
    `config`.
    """
    verify_tokens(config, "inputs", inputs)
    rngs = {"dropout": key} if key is not None and config.dropout else {}
    model = BERT(config, deterministic=not rngs)
    return cast(jax.Array, model.apply({"params": params}, inputs, segments, rngs=rngs))


def loss(config: Config, params: Any, batch: dict[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats per masked token, a float32 scalar (float64 if the model computes in it).

    `batch` holds `inputs`, `segments` and `targets`, each int32[batch, sequence], and `mask`, bool[batch, sequence]:
    where a token counts. The mean is over all masked tokens of the batch, however many there are in each sequence.
    Dropout acts only if there is a `key` for it.
    """
    predicted = logits(config, params, batch["inputs"], batch["segments"], key)
    return masked_mean(cross_entropy(predicted, batch["targets"]), batch["mask"])


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random `targets`; `inputs` in which about 15 % are replaced by the mask token, where `mask` is true; `segments`.

    The first half of a sequence is segment 0, the second is segment 1. All are [batch, sequence].
    """
    shape = batch_size, config.sequence_length
    token_key, mask_key = jax.random.split(key)
    targets = jax.random.randint(token_key, shape, MASK_TOKEN + 1, config.vocab_size, dtype=jnp.int32)
    mask = jax.random.bernoulli(mask_key, MASKED_SHARE, shape)
    second = jnp.arange(config.sequence_length) >= config.sequence_length // 2
    return {
        "inputs": jnp.where(mask, MASK_TOKEN, targets),
        "targets": targets,
        "mask": mask,
        "segments": jnp.broadcast_to(second.astype(jnp.int32), shape),
    }


def parameters(config: Config) -> int:
    """The number of parameters; the embedding counts once, as it is tied."""
    hidden, norm = config.hidden, 2 * config.hidden
    block = attention_parameters(hidden) + mlp_parameters(hidden, config.mlp_factor) + 2 * norm
    embed = (config.vocab_size + config.sequence_length + SEGMENTS) * hidden + norm
    head = hidden * hidden + hidden + norm + config.vocab_size
    return config.layers * block + embed + head


def flops(config: Config, batch_size: int) -> float:
    """Floating-point operations of one training step; a multiply-add is two, and only matrix products count.

    This is that of a GPT of the same sizes, and 6 B S H^2 for the dense layer before the output projection.
    """
    tokens, hidden = batch_size * config.sequence_length, config.hidden
    dense = (8 + 4 * config.mlp_factor) * tokens * hidden**2
    attention = 4 * tokens * config.sequence_length * hidden
    passes = 4 if config.remat else 3
    return float(passes * config.layers * (dense + attention) + 6 * tokens * hidden * (hidden + config.vocab_size))
