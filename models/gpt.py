"""Decoder-only GPT: pre-layer-norm blocks, learned positions, embedding tied to the output projection.

Dimensions that a planner may want to split (batch, heads, head size, hidden, vocabulary) are never merged or cut by a
reshape: one projection yields query, key and value of all heads as [batch, sequence, 3, heads, head_dim].

**Reference**: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
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
    causal,
    cross_entropy,
    embed_options,
    example_tokens,
    mlp_parameters,
    precision_options,
    stack,
    verify,
    verify_divides,
    verify_preset,
    verify_tokens,
)

# The sizes that Alpa (OSDI 2022, and its repository) trains: name -> hidden, layers, heads.
ALPA_SIZES = {
    "125M": (768, 12, 12),
    "350M": (1024, 24, 16),
    "760M": (1536, 24, 16),
    "1.3B": (2048, 24, 32),
    "2.6B": (2560, 32, 32),
    "6.7B": (4096, 32, 32),
    "15B": (5120, 48, 40),
    "39B": (8192, 48, 64),
    "76B": (10240, 60, 80),
}

PRESETS = ("tiny", *ALPA_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a GPT and the precision it runs in.

    `dtype` is what activations are computed in, `param_dtype` what parameters (and so gradients and optimizer state)
    are kept in; float64 needs `jax_enable_x64`. With `remat`, each block's backward pass recomputes the block. With
    `scan_layers`, the blocks are one loop over stacked parameters, which traces and compiles faster.

    Raises ValueError if `heads` does not divide `hidden`, a size is not positive, or a dtype is not one of `DTYPES`.
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
        """A byte-level model of 0.8 million parameters; every dimension is a multiple of 8, for 8 devices."""
        return cls(vocab_size=256, sequence_length=128, hidden=128, layers=4, heads=8)

    @classmethod
    def alpa(cls, name: str) -> Self:
        """A model as Alpa trains it: float16 over float32 parameters, every block recomputed in the backward pass.

        Raises KeyError if `name` is not in `ALPA_SIZES`.
        """
        hidden, layers, heads = ALPA_SIZES[name]
        return cls(
            vocab_size=51200,
            sequence_length=1024,
            hidden=hidden,
            layers=layers,
            heads=heads,
            dtype="float16",
            remat=True,
        )

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration called `name` in `PRESETS`; `dataclasses.replace` changes a field of it.

        Raises ValueError, with the names there are, for any other name.
        """
        verify_preset("GPT", name, PRESETS)
        return cls.tiny() if name == "tiny" else cls.alpa(name)

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads


class Block(nn.Module):
    """Attention, then MLP, each normalised before and added to its input: [batch, sequence, hidden] -> the same."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.config.dropout, deterministic=self.deterministic)
        y = nn.LayerNorm(name="attention_norm", **precision_options(self.config))(x)
        x = x + drop(Attention(self.config, self.deterministic, name="attention")(y, causal(y.shape[1])))
        y = nn.LayerNorm(name="mlp_norm", **precision_options(self.config))(x)
        return x + drop(MLP(self.config, name="mlp")(y))


class GPT(nn.Module):
    """Logits [batch, sequence, vocabulary] of each next token, from tokens int32[batch, sequence]."""

    config: Config
    deterministic: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        embed = nn.Embed(config.vocab_size, config.hidden, name="embed", **embed_options(config))
        positions = self.param(
            "positions", NORMAL, (config.sequence_length, config.hidden), jnp.dtype(config.param_dtype)
        )
        x = embed(tokens) + positions.astype(config.dtype)
        x = nn.Dropout(config.dropout, deterministic=self.deterministic)(x)
        x = stack(Block, config, x, self.deterministic)
        return embed.attend(nn.LayerNorm(name="norm", **precision_options(config))(x))


def init(config: Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    tokens = jnp.zeros((1, config.sequence_length), dtype=jnp.int32)
    return GPT(config).init(key, tokens)["params"]


def logits(config: Config, params: Any, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Logits [batch, sequence, vocabulary] of the token after each of `inputs` int32[batch, sequence].

    Dropout acts only if there is a `key` for it. Raises ValueError if `inputs` has another sequence length than
    `config`.
    """
    verify_tokens(config, "inputs", inputs)
    rngs = {"dropout": key} if key is not None and config.dropout else {}
    model = GPT(config, deterministic=not rngs)
    return cast(jax.Array, model.apply({"params": params}, inputs, rngs=rngs))


def loss(config: Config, params: Any, batch: dict[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar (float64 if the model computes in it).

    `batch` holds `inputs` and `targets`, each int32[batch, sequence]. Dropout acts only if there is a `key` for it.
    """
    return cross_entropy(logits(config, params, batch["inputs"], key), batch["targets"]).mean()


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random tokens as `inputs` and `targets`, each int32[batch, sequence], the targets one token ahead."""
    return example_tokens(config, batch_size, key)


def parameters(config: Config) -> int:
    """The number of parameters; the embedding counts once, as it is tied.

    With `mlp_factor` 4 this is 12 L H^2 (1 + 13 / (12 H) + (V + S) / (12 L H)), and 2 H for the last layer norm.

    **Reference**: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    (SC 2021), equation 2.
    """
    hidden = config.hidden
    norm = 2 * hidden
    block = attention_parameters(hidden) + mlp_parameters(hidden, config.mlp_factor) + 2 * norm
    return config.layers * block + norm + (config.vocab_size + config.sequence_length) * hidden


def flops(config: Config, batch_size: int) -> float:
    """Floating-point operations of one training step; a multiply-add is two, and only matrix products count.

    With `mlp_factor` 4 this is k B S L H^2 (1 + S / (6 H)) + 6 B S H V, where k is 72 (24 forward, 48 backward), and
    96 with `remat`, which runs every block forward twice. Causal attention counts in full, masked half included.

    **Reference**: Narayanan et al. (SC 2021), equation 3 and the appendix that derives it.
    """
    tokens = batch_size * config.sequence_length
    dense = (8 + 4 * config.mlp_factor) * tokens * config.hidden**2
    attention = 4 * tokens * config.sequence_length * config.hidden
    passes = 4 if config.remat else 3
    return float(passes * config.layers * (dense + attention) + 6 * tokens * config.hidden * config.vocab_size)
