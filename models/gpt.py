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
import optax

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

DTYPES = ("float16", "bfloat16", "float32", "float64")

INITIAL_STDDEV = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a GPT and the precision it runs in.

    `dtype` is what activations are computed in, `param_dtype` what parameters (and so gradients and optimizer state)
    are kept in; float64 needs `jax_enable_x64`. With `remat`, each block's backward pass recomputes the block.

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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "sequence_length", "hidden", "layers", "heads", "mlp_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a size must be at least 1")
        if self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide hidden={self.hidden}: every head needs the same number of "
                f"features; take a number of heads that divides {self.hidden}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: a probability in [0, 1) is needed")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(DTYPES)}")

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
        if name not in PRESETS:
            raise ValueError(f"no GPT preset is called {name!r}; there are {', '.join(PRESETS)}")
        return cls.tiny() if name == "tiny" else cls.alpa(name)

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads


class Attention(nn.Module):
    """Causal self-attention [batch, sequence, hidden] -> the same shape."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        qkv = nn.DenseGeneral((3, config.heads, config.head_dim), name="qkv", **dense_options(config))(x)
        query, key, value = (qkv[:, :, i] for i in range(3))

        scores = jnp.einsum("bqhd,bkhd->bhqk", query * config.head_dim**-0.5, key)
        scores = at_least_float32(scores)  # half precision would lose the small terms of the softmax's sum
        past = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
        scores = jnp.where(past, scores, jnp.finfo(scores.dtype).min)  # -inf could make NaN gradients
        weights = nn.softmax(scores).astype(value.dtype)
        weights = nn.Dropout(config.dropout, deterministic=self.deterministic)(weights)

        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(config.hidden, axis=(-2, -1), name="out", **residual_options(config))(mixed)


class MLP(nn.Module):
    """Two dense layers around a GELU, position by position: [batch, sequence, hidden] -> the same shape."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Dense(config.mlp_factor * config.hidden, name="up", **dense_options(config))(x)
        return nn.Dense(config.hidden, name="down", **residual_options(config))(nn.gelu(x))


class Block(nn.Module):
    """Attention, then MLP, each normalised before and added to its input: [batch, sequence, hidden] -> the same."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.config.dropout, deterministic=self.deterministic)
        y = nn.LayerNorm(name="attention_norm", **precision_options(self.config))(x)
        x = x + drop(Attention(self.config, self.deterministic, name="attention")(y))
        y = nn.LayerNorm(name="mlp_norm", **precision_options(self.config))(x)
        return x + drop(MLP(self.config, name="mlp")(y))


class GPT(nn.Module):
    """Logits [batch, sequence, vocabulary] of each next token, from tokens int32[batch, sequence]."""

    config: Config
    deterministic: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        normal = nn.initializers.normal(INITIAL_STDDEV)
        embed = nn.Embed(
            config.vocab_size, config.hidden, name="embed", embedding_init=normal, **precision_options(config)
        )
        positions = self.param(
            "positions", normal, (config.sequence_length, config.hidden), jnp.dtype(config.param_dtype)
        )
        x = embed(tokens) + positions.astype(config.dtype)
        x = nn.Dropout(config.dropout, deterministic=self.deterministic)(x)
        block = nn.remat(Block) if config.remat else Block
        for i in range(config.layers):
            x = block(config, self.deterministic, name=f"Block_{i}")(x)
        return embed.attend(nn.LayerNorm(name="norm", **precision_options(config))(x))


def precision_options(config: Config) -> dict[str, Any]:
    """The arguments that give a flax layer the configuration's dtypes."""
    return {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}


def dense_options(config: Config) -> dict[str, Any]:
    """The arguments of a dense layer: dtypes and initialiser."""
    return precision_options(config) | {"kernel_init": nn.initializers.normal(INITIAL_STDDEV)}


def residual_options(config: Config) -> dict[str, Any]:
    """The arguments of a dense layer that ends a residual branch.

    Its initial weights shrink with the number of branches that are summed, 2 a block, so that the sum does not grow.

    **Reference**: Radford et al. (2019), section 2.3.
    """
    stddev = INITIAL_STDDEV * (2 * config.layers) ** -0.5
    return precision_options(config) | {"kernel_init": nn.initializers.normal(stddev)}


def at_least_float32(x: jax.Array) -> jax.Array:
    """`x` in float32, or in its own dtype if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def init(config: Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    tokens = jnp.zeros((1, config.sequence_length), dtype=jnp.int32)
    return GPT(config).init(key, tokens)["params"]


def logits(config: Config, params: Any, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Logits [batch, sequence, vocabulary] of the token after each of `inputs` int32[batch, sequence].

    Dropout acts only if there is a `key` for it. Raises ValueError if `inputs` has another sequence length than
    `config`.
    """
    if inputs.ndim != 2 or inputs.shape[1] != config.sequence_length:
        raise ValueError(
            f"inputs has shape {list(inputs.shape)}, where [batch, {config.sequence_length}] is needed: the model has "
            f"one learned position for each of sequence_length={config.sequence_length} tokens"
        )
    rngs = {"dropout": key} if key is not None and config.dropout else {}
    model = GPT(config, deterministic=not rngs)
    return cast(jax.Array, model.apply({"params": params}, inputs, rngs=rngs))


def loss(config: Config, params: Any, batch: dict[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar (float64 if the model computes in it).

    `batch` holds `inputs` and `targets`, each int32[batch, sequence]. Dropout acts only if there is a `key` for it.
    """
    predicted = at_least_float32(logits(config, params, batch["inputs"], key))
    return optax.softmax_cross_entropy_with_integer_labels(predicted, batch["targets"]).mean()


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random tokens as `inputs` and `targets`, each int32[batch, sequence], the targets one token ahead."""
    tokens = jax.random.randint(key, (batch_size, config.sequence_length + 1), 0, config.vocab_size, dtype=jnp.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def parameters(config: Config) -> int:
    """The number of parameters; the embedding counts once, as it is tied.

    With `mlp_factor` 4 this is 12 L H^2 (1 + 13 / (12 H) + (V + S) / (12 L H)), and 2 H for the last layer norm.

    **Reference**: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    (SC 2021), equation 2.
    """
    hidden, wide = config.hidden, config.mlp_factor * config.hidden
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = 2 * hidden * wide + wide + hidden
    norm = 2 * hidden
    return config.layers * (attention + mlp + 2 * norm) + norm + (config.vocab_size + config.sequence_length) * hidden


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
