"""Encoder-decoder Transformer for translation: post-layer-norm blocks, sinusoidal positions, ReLU.

**Reference**: Vaswani et al., "Attention Is All You Need" (2017), section 3 and table 3.
"""

from dataclasses import dataclass
from typing import Any, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import (
    MLP,
    Attention,
    CrossAttention,
    attention_parameters,
    causal,
    cross_entropy,
    dense_options,
    embed_options,
    masked_mean,
    mlp_parameters,
    precision_options,
    verify,
    verify_divides,
    verify_preset,
    verify_tokens,
)

# name -> hidden, heads, dropout
SIZES = {"base": (512, 8, 0.1), "big": (1024, 16, 0.3)}

PRESETS = ("tiny", *SIZES)

PADDING = 0
BEGIN = 1
END = 2

SLOWEST_PERIOD = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a Transformer and the precision it runs in.

    `layers` blocks encode, as many decode. With `tied`, one matrix embeds source and target and projects the output;
    without, there are three. `dtype` is what activations are computed in, `param_dtype` what parameters are kept in;
    float64 needs `jax_enable_x64`.

    Raises ValueError if `heads` does not divide `hidden`, which must be even, a size is not positive, the vocabulary
    holds nothing but the three special tokens, or a dtype is not one of `models.layers.DTYPES`.
    """

    vocab_size: int
    sequence_length: int
    hidden: int
    layers: int
    heads: int
    mlp_factor: int = 4
    tied: bool = True
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        verify(self)
        verify_divides(self, "heads", "hidden")
        if self.hidden % 2:
            raise ValueError(f"hidden={self.hidden} is odd: each position is half sines, half cosines")
        if self.vocab_size <= END + 1:
            raise ValueError(f"vocab_size={self.vocab_size}: there must be tokens besides padding, begin and end")

    @classmethod
    def tiny(cls) -> Self:
        """A byte-level model of 1.9 million parameters; every dimension is a multiple of 8, for 8 devices."""
        return cls(vocab_size=256, sequence_length=128, hidden=128, layers=4, heads=8)

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration called `name` in `PRESETS`; `dataclasses.replace` changes a field of it.

        Raises ValueError, with the names there are, for any other name.
        """
        verify_preset("Transformer", name, PRESETS)
        if name == "tiny":
            return cls.tiny()
        hidden, heads, dropout = SIZES[name]
        return cls(vocab_size=37000, sequence_length=256, hidden=hidden, layers=6, heads=heads, dropout=dropout)

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads


def sinusoids(length: int, hidden: int, dtype: str) -> jax.Array:
    """The code of each position, [length, hidden]: sines of falling frequencies, then their cosines."""
    exact = jnp.promote_types(dtype, jnp.float32)
    frequencies = SLOWEST_PERIOD ** (-jnp.arange(hidden // 2, dtype=exact) / (hidden // 2))
    angles = jnp.arange(length, dtype=exact)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)


class Encoder(nn.Module):
    """A block of the encoder [batch, source, hidden] -> the same shape; `mask` is false where the source is padding."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.config.dropout, deterministic=self.deterministic)
        y = drop(Attention(self.config, self.deterministic, name="attention")(x, mask))
        x = nn.LayerNorm(name="attention_norm", **precision_options(self.config))(x + y)
        y = drop(MLP(self.config, nn.relu, name="mlp")(x))
        return nn.LayerNorm(name="mlp_norm", **precision_options(self.config))(x + y)


class Decoder(nn.Module):
    """A block of the decoder [batch, target, hidden] -> the same shape, which sees the past and the encoder's output.

    The past needs no mask of padding: padding comes last.
    """

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.config.dropout, deterministic=self.deterministic)
        y = drop(Attention(self.config, self.deterministic, name="attention")(x, causal(x.shape[1])))
        x = nn.LayerNorm(name="attention_norm", **precision_options(self.config))(x + y)
        y = drop(CrossAttention(self.config, self.deterministic, name="cross")(x, memory, mask))
        x = nn.LayerNorm(name="cross_norm", **precision_options(self.config))(x + y)
        y = drop(MLP(self.config, nn.relu, name="mlp")(x))
        return nn.LayerNorm(name="mlp_norm", **precision_options(self.config))(x + y)


class Transformer(nn.Module):
    """Logits [batch, sequence, vocabulary] of each next token of `inputs`, given the sentence `source`."""

    config: Config
    deterministic: bool = True

    @nn.compact
    def __call__(self, source: jax.Array, inputs: jax.Array) -> jax.Array:
        config = self.config
        embed_source = nn.Embed(config.vocab_size, config.hidden, name="embed", **embed_options(config))
        embed_target = (
            embed_source
            if config.tied
            else nn.Embed(config.vocab_size, config.hidden, name="embed_target", **embed_options(config))
        )
        drop = nn.Dropout(config.dropout, deterministic=self.deterministic)
        positions = sinusoids(config.sequence_length, config.hidden, config.dtype)
        mask = (source != PADDING)[:, None, None, :]

        memory = drop(embed_source(source) * config.hidden**0.5 + positions)
        for i in range(config.layers):
            memory = Encoder(config, self.deterministic, name=f"Encoder_{i}")(memory, mask)

        x = drop(embed_target(inputs) * config.hidden**0.5 + positions)
        for i in range(config.layers):
            x = Decoder(config, self.deterministic, name=f"Decoder_{i}")(x, memory, mask)

        if config.tied:
            return embed_target.attend(x)
        return nn.Dense(config.vocab_size, use_bias=False, name="head", **dense_options(config))(x)


def init(config: Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    tokens = jnp.zeros((1, config.sequence_length), dtype=jnp.int32)
    return Transformer(config).init(key, tokens, tokens)["params"]


def logits(
    config: Config, params: Any, source: jax.Array, inputs: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Logits [batch, sequence, vocabulary] of the token after each of `inputs`, given the sentence `source`.

    Both are int32[batch, sequence]. Dropout acts only if there is a `key` for it. Raises ValueError if one has another
    sequence length than `config`.
    """
    verify_tokens(config, "source", source)
    verify_tokens(config, "inputs", inputs)
    rngs = {"dropout": key} if key is not None and config.dropout else {}
    model = Transformer(config, deterministic=not rngs)
    return cast(jax.Array, model.apply({"params": params}, source, inputs, rngs=rngs))


def loss(config: Config, params: Any, batch: dict[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats per target token that is no padding, a float32 scalar (float64 if so computed).

    `batch` holds `source`, `inputs` and `targets`, each int32[batch, sequence]. The decoder is given the right past
    whatever it predicts. Dropout acts only if there is a `key` for it.
    """
    predicted = logits(config, params, batch["source"], batch["inputs"], key)
    return masked_mean(cross_entropy(predicted, batch["targets"]), batch["targets"] != PADDING)


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random sentences of random lengths: `source`, `targets` and, a token behind, `inputs`.

    All are int32[batch, sequence]. A sentence ends with `END` and is filled up with `PADDING`; `inputs` start with
    `BEGIN`. At least half is no padding.
    """
    source_key, target_key = jax.random.split(key)
    targets = sentences(config, batch_size, target_key)
    begin = jnp.full((batch_size, 1), BEGIN, dtype=jnp.int32)
    inputs = jnp.concatenate([begin, targets[:, :-1]], axis=1)
    return {"source": sentences(config, batch_size, source_key), "inputs": inputs, "targets": targets}


def sentences(config: Config, batch_size: int, key: jax.Array) -> jax.Array:
    """Random tokens, then `END`, then `PADDING`, int32[batch, sequence]."""
    token_key, length_key = jax.random.split(key)
    length = config.sequence_length
    tokens = jax.random.randint(token_key, (batch_size, length), END + 1, config.vocab_size, dtype=jnp.int32)
    last = jax.random.randint(length_key, (batch_size, 1), length // 2, length, dtype=jnp.int32)
    place = jnp.arange(length)
    return jnp.where(place < last, tokens, jnp.where(place == last, END, PADDING))


def parameters(config: Config) -> int:
    """The number of parameters; a tied embedding counts once."""
    hidden, norm = config.hidden, 2 * config.hidden
    attention, mlp = attention_parameters(hidden), mlp_parameters(hidden, config.mlp_factor)
    blocks = config.layers * (3 * attention + 2 * mlp + 5 * norm)
    return blocks + (1 if config.tied else 3) * config.vocab_size * hidden


def flops(config: Config, batch_size: int) -> float:
    """Floating-point operations of one training step; a multiply-add is two, and only matrix products count.

    With f = `mlp_factor` this is 3 L (B S H^2 (24 + 8 f) + 12 B S^2 H) + 6 B S H V: three attentions and two MLPs for
    each of L layers. Padding, and what a mask hides, counts in full.
    """
    tokens, hidden = batch_size * config.sequence_length, config.hidden
    dense = (24 + 8 * config.mlp_factor) * tokens * hidden**2
    attention = 12 * tokens * config.sequence_length * hidden
    return float(3 * config.layers * (dense + attention) + 6 * tokens * hidden * config.vocab_size)
