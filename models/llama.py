"""LLaMA: pre-normalised blocks of rotary grouped-query attention and SwiGLU, no biases, an untied output projection.

Dimensions that a planner may want to split (batch, key-value heads, group, head size, hidden, MLP, vocabulary) are
never merged by a reshape: queries are [batch, sequence, kv_heads, group, head_dim], where a group shares a key and a
value.

**Reference**: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023), section 2.2; Grattafiori
et al., "The Llama 3 Herd of Models" (2024), table 3.
"""

from dataclasses import dataclass
from typing import Any, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import (
    at_least_float32,
    attend,
    causal,
    cross_entropy,
    dense_options,
    embed_options,
    example_tokens,
    precision_options,
    stack,
    verify,
    verify_divides,
    verify_preset,
    verify_tokens,
)

# name -> hidden, layers, heads, key-value heads, MLP features
LLAMA_SIZES = {
    "7B": (4096, 32, 32, 32, 11008),
    "13B": (5120, 40, 40, 40, 13824),
    "33B": (6656, 60, 52, 52, 17920),
    "65B": (8192, 80, 64, 64, 22016),
}
LLAMA3_SIZES = {
    "3-8B": (4096, 32, 32, 8, 14336),
    "3-70B": (8192, 80, 64, 8, 28672),
}

PRESETS = ("tiny", *LLAMA_SIZES, *LLAMA3_SIZES)

NORM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a LLaMA and the precision it runs in.

    `rotary_base` is the base of the rotary frequencies. `dtype` is what activations are computed in, `param_dtype` what
    parameters are kept in; float64 needs `jax_enable_x64`. With `remat`, each block's backward pass recomputes the
    block. With `scan_layers`, the blocks are one loop over stacked parameters, which traces and compiles faster.

    Raises ValueError if `heads` does not divide `hidden`, `kv_heads` does not divide `heads`, a head's size is odd, a
    size is not positive, or a dtype is not one of `models.layers.DTYPES`.
    """

    vocab_size: int
    sequence_length: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    rotary_base: float = 10_000.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False
    scan_layers: bool = False

    def __post_init__(self) -> None:
        verify(self)
        verify_divides(self, "heads", "hidden")
        verify_divides(self, "kv_heads", "heads")
        if self.head_dim % 2:
            raise ValueError(f"hidden={self.hidden} / heads={self.heads} is odd: rotation pairs the features of a head")

    @classmethod
    def tiny(cls) -> Self:
        """A byte-level model of 0.9 million parameters; every dimension is a multiple of 8, for 8 devices."""
        return cls(vocab_size=256, sequence_length=128, hidden=128, layers=4, heads=16, kv_heads=8, mlp=384)

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration called `name` in `PRESETS`; `dataclasses.replace` changes a field of it.

        All but "tiny" compute in bfloat16 over float32 parameters and recompute every block in the backward pass.
        Raises ValueError, with the names there are, for any other name.
        """
        verify_preset("LLaMA", name, PRESETS)
        if name == "tiny":
            return cls.tiny()
        third = name in LLAMA3_SIZES
        hidden, layers, heads, kv_heads, mlp = (LLAMA_SIZES | LLAMA3_SIZES)[name]
        return cls(
            vocab_size=128256 if third else 32000,
            sequence_length=8192 if third else 2048,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            mlp=mlp,
            rotary_base=500_000.0 if third else 10_000.0,
            dtype="bfloat16",
            remat=True,
        )

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads

    @property
    def group(self) -> int:
        """Queries that share a key and a value."""
        return self.heads // self.kv_heads


def rotate(x: jax.Array, base: float) -> jax.Array:
    """`x` [batch, sequence, ..., head_dim], every feature pair turned by an angle that grows with the position.

    Feature i is paired with i + head_dim / 2, whose angle at position p is p base^(-2 i / head_dim). So the product of
    a query and a key depends on their distance, not on where they are.

    **Reference**: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), equation 34.
    """
    exact = at_least_float32(x)  # half precision cannot tell late positions apart
    low, high = jnp.split(exact, 2, axis=-1)
    half = low.shape[-1]
    frequencies = base ** (-jnp.arange(half, dtype=exact.dtype) / half)
    angles = jnp.arange(x.shape[1], dtype=exact.dtype)[:, None] * frequencies
    angles = jnp.expand_dims(angles, range(1, x.ndim - 2))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions [batch, sequence, hidden] -> the same shape."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, options = self.config, unbiased_options(self.config)
        query = nn.DenseGeneral((config.kv_heads, config.group, config.head_dim), name="query", **options)(x)
        pair = nn.DenseGeneral((2, config.kv_heads, config.head_dim), name="key_value", **options)(x)
        query, key = (rotate(y, config.rotary_base) for y in (query, pair[:, :, 0]))
        mixed = attend(query, key, pair[:, :, 1], causal(x.shape[1]))
        return nn.DenseGeneral(config.hidden, axis=(-3, -2, -1), name="out", **options)(mixed)


class SwiGLU(nn.Module):
    """A dense layer gated by another, then one back: [batch, sequence, hidden] -> the same shape.

    **Reference**: Shazeer, "GLU Variants Improve Transformer" (2020), equation 6.
    """

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, options = self.config, unbiased_options(self.config)
        gate = nn.Dense(config.mlp, name="gate", **options)(x)
        up = nn.Dense(config.mlp, name="up", **options)(x)
        return nn.Dense(config.hidden, name="down", **options)(nn.silu(gate) * up)


class Block(nn.Module):
    """Attention, then SwiGLU, each normalised before and added to its input: [batch, sequence, hidden] -> the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.RMSNorm(NORM_EPSILON, name="attention_norm", **precision_options(self.config))(x)
        x = x + Attention(self.config, name="attention")(y)
        y = nn.RMSNorm(NORM_EPSILON, name="mlp_norm", **precision_options(self.config))(x)
        return x + SwiGLU(self.config, name="mlp")(y)


class LLaMA(nn.Module):
    """Logits [batch, sequence, vocabulary] of each next token, from tokens int32[batch, sequence]."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Embed(config.vocab_size, config.hidden, name="embed", **embed_options(config))(tokens)
        x = stack(Block, config, x)
        x = nn.RMSNorm(NORM_EPSILON, name="norm", **precision_options(config))(x)
        return nn.Dense(config.vocab_size, name="head", **unbiased_options(config))(x)


def unbiased_options(config: Config) -> dict[str, Any]:
    """The arguments of a dense layer without a bias: dtypes and initialiser."""
    return dense_options(config) | {"use_bias": False}


def init(config: Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    tokens = jnp.zeros((1, config.sequence_length), dtype=jnp.int32)
    return LLaMA(config).init(key, tokens)["params"]


def logits(config: Config, params: Any, inputs: jax.Array) -> jax.Array:
    """Logits [batch, sequence, vocabulary] of the token after each of `inputs` int32[batch, sequence].

    Raises ValueError if `inputs` has another sequence length than `config`.
    """
    verify_tokens(config, "inputs", inputs)
    return cast(jax.Array, LLaMA(config).apply({"params": params}, inputs))


def loss(config: Config, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar (float64 if the model computes in it).

    `batch` holds `inputs` and `targets`, each int32[batch, sequence].
    """
    return cross_entropy(logits(config, params, batch["inputs"]), batch["targets"]).mean()


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random tokens as `inputs` and `targets`, each int32[batch, sequence], the targets one token ahead."""
    return example_tokens(config, batch_size, key)


def parameters(config: Config) -> int:
    """The number of parameters; embedding and output projection count each."""
    return config.layers * (weights(config) + 2 * config.hidden) + (2 * config.vocab_size + 1) * config.hidden


def weights(config: Config) -> int:
    """The number of weights in the matrices of one block."""
    attention = 2 * config.hidden * config.head_dim * (config.heads + config.kv_heads)
    return attention + 3 * config.hidden * config.mlp


def flops(config: Config, batch_size: int) -> float:
    """Floating-point operations of one training step; a multiply-add is two, and only matrix products count.

    This is k L (2 B S W + 4 B S^2 H) + 6 B S H V for the W weights of a block, where k is 3 (forward once, backward
    twice), and 4 with `remat`, which runs every block forward twice. Causal attention counts in full.
    """
    tokens = batch_size * config.sequence_length
    block = 2 * tokens * weights(config) + 4 * tokens * config.sequence_length * config.hidden
    return float((4 if config.remat else 3) * config.layers * block + 6 * tokens * config.hidden * config.vocab_size)
