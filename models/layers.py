"""The parts that models share: checks of a configuration, layers in its precision, attention, equal blocks, loss terms.

A configuration is any object with the fields that a function reads; each protocol below names some of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

DTYPES = ("float16", "bfloat16", "float32", "float64")

INITIAL_STDDEV = 0.02
NORMAL = nn.initializers.normal(INITIAL_STDDEV)


class Precision(Protocol):
    """`dtype` is what activations are computed in, `param_dtype` what parameters are kept in."""

    @property
    def dtype(self) -> str: ...
    @property
    def param_dtype(self) -> str: ...


class Stack(Precision, Protocol):
    """Equal blocks, one after another; each is recomputed in the backward pass with `remat`."""

    @property
    def layers(self) -> int: ...
    @property
    def remat(self) -> bool: ...
    @property
    def scan_layers(self) -> bool: ...


class Transformer(Precision, Protocol):
    """The sizes of an attention and an MLP."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_factor(self) -> int: ...
    @property
    def dropout(self) -> float: ...


def verify(config: Any) -> None:
    """Raises ValueError where a field of the dataclass `config` has a value that no model can have.

    Whole numbers are positive, `dropout` is a probability below 1, and dtypes are among `DTYPES`.
    """
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        if type(value) is int and value < 1:
            raise ValueError(f"{name}={value}: a size must be at least 1")
        if name == "dropout" and not 0 <= value < 1:
            raise ValueError(f"dropout={value}: a probability in [0, 1) is needed")
        if name in ("dtype", "param_dtype") and value not in DTYPES:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(DTYPES)}")


def verify_divides(config: Any, part: str, whole: str) -> None:
    """Raises ValueError where the field `part` of `config` does not divide its field `whole`."""
    divisor, number = getattr(config, part), getattr(config, whole)
    if number % divisor:
        raise ValueError(
            f"{part}={divisor} does not divide {whole}={number}: each of the {part} needs the same share; take a "
            f"number that divides {number}"
        )


def verify_preset(model: str, name: str, presets: Iterable[str]) -> None:
    """Raises ValueError, with the names there are, where `name` is none of `presets`."""
    if name not in presets:
        raise ValueError(f"no {model} preset is called {name!r}; there are {', '.join(presets)}")


def verify_tokens(config: Any, name: str, tokens: jax.Array) -> None:
    """Raises ValueError where `tokens` is not [batch, sequence] of the configured `sequence_length`."""
    if tokens.ndim != 2 or tokens.shape[1] != config.sequence_length:
        raise ValueError(
            f"{name} has shape {list(tokens.shape)}, where [batch, {config.sequence_length}] is needed: the model is "
            f"configured for sequence_length={config.sequence_length} tokens"
        )


def precision_options(config: Precision) -> dict[str, Any]:
    """The arguments that give a flax layer the configuration's dtypes."""
    return {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}


def dense_options(config: Precision, kernel_init: nn.initializers.Initializer = NORMAL) -> dict[str, Any]:
    """The arguments of a dense layer or a convolution: dtypes and initialiser."""
    return precision_options(config) | {"kernel_init": kernel_init}


def residual_options(config: Transformer) -> dict[str, Any]:
    """The arguments of a dense layer that ends a residual branch.

    Its initial weights shrink with the number of branches that are summed, 2 a block, so that the sum does not grow.

    **Reference**: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
    """
    return dense_options(config, residual_init(config.layers))


def residual_init(layers: int) -> nn.initializers.Initializer:
    """The initialiser of the weights that end a residual branch, 2 in each of `layers` blocks."""
    return nn.initializers.normal(INITIAL_STDDEV * (2 * layers) ** -0.5)


def embed_options(config: Precision) -> dict[str, Any]:
    """The arguments of an embedding: dtypes and initialiser."""
    return precision_options(config) | {"embedding_init": NORMAL}


def at_least_float32(x: jax.Array) -> jax.Array:
    """`x` in float32, or in its own dtype if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def causal(length: int) -> jax.Array:
    """The mask bool[query, key] under which a position sees itself and those before it."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    drop: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
    """The values that each query sees, averaged by its softmax weights, in the shape of `query`.

    `query` is [batch, query, heads, head_dim], or [batch, query, heads, group, head_dim] where the queries of a group
    share their key and value; `key` and `value` are [batch, key, heads, head_dim]. `mask` broadcasts to the scores
    [batch, heads, (group,) query, key] and is false where a query must not look. `drop` acts on the weights.

    **Reference**: Vaswani et al., "Attention Is All You Need" (2017), equation 1; Ainslie et al., "GQA" (2023).
    """
    scores = jnp.einsum("bqh...d,bkhd->bh...qk", query * query.shape[-1] ** -0.5, key)
    scores = at_least_float32(scores)  # half precision would lose the small terms of the softmax's sum
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)  # -inf could make NaN gradients
    weights = drop(nn.softmax(scores).astype(value.dtype))
    return jnp.einsum("bh...qk,bkhd->bqh...d", weights, value)


class Attention(nn.Module):
    """Self-attention [batch, sequence, hidden] -> the same shape; all positions see each other without a `mask`."""

    config: Transformer
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        config = self.config
        qkv = nn.DenseGeneral((3, config.heads, config.head_dim), name="qkv", **dense_options(config))(x)
        query, key, value = (qkv[:, :, i] for i in range(3))
        mixed = attend(query, key, value, mask, nn.Dropout(config.dropout, deterministic=self.deterministic))
        return nn.DenseGeneral(config.hidden, axis=(-2, -1), name="out", **residual_options(config))(mixed)


class CrossAttention(nn.Module):
    """Attention of `x` [batch, query, hidden] to `memory` [batch, key, hidden], in the shape of `x`."""

    config: Transformer
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        config = self.config
        query = nn.DenseGeneral((config.heads, config.head_dim), name="query", **dense_options(config))(x)
        pair = nn.DenseGeneral((2, config.heads, config.head_dim), name="key_value", **dense_options(config))(memory)
        drop = nn.Dropout(config.dropout, deterministic=self.deterministic)
        mixed = attend(query, pair[:, :, 0], pair[:, :, 1], mask, drop)
        return nn.DenseGeneral(config.hidden, axis=(-2, -1), name="out", **residual_options(config))(mixed)


class MLP(nn.Module):
    """Two dense layers around an activation, position by position: [batch, sequence, hidden] -> the same shape."""

    config: Transformer
    activation: Callable[[jax.Array], jax.Array] = nn.gelu

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Dense(config.mlp_factor * config.hidden, name="up", **dense_options(config))(x)
        return nn.Dense(config.hidden, name="down", **residual_options(config))(self.activation(x))


def attention_parameters(hidden: int) -> int:
    """The number of parameters of an `Attention` or a `CrossAttention`."""
    return 4 * hidden * hidden + 4 * hidden


def mlp_parameters(hidden: int, factor: int) -> int:
    """The number of parameters of an `MLP`."""
    return 2 * factor * hidden * hidden + (factor + 1) * hidden


def stack(block: type[nn.Module], config: Stack, x: jax.Array, *options: Any) -> jax.Array:
    """`x` after `config.layers` blocks, each a `block(config, *options)` from `x` to the shape of `x`.

    The parameters are `Block_0`, `Block_1`, ...; with `scan_layers` they are one `Block`, whose leaves have a leading
    dimension of layers, and the blocks become the body of one loop.
    """
    if config.remat:
        # A loop already keeps the compiler from sharing the recomputation with the first computation.
        block = nn.remat(block, prevent_cse=not config.scan_layers)
    if not config.scan_layers:
        for i in range(config.layers):
            x = block(config, *options, name=f"Block_{i}")(x)
        return x
    loop = nn.scan(
        lambda block, x, _: (block(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=config.layers,
    )
    return loop(block(config, *options, name="Block"), x, None)[0]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The nats that `logits` [..., classes] give each of `labels` int32[...], in at least float32."""
    return optax.softmax_cross_entropy_with_integer_labels(at_least_float32(logits), labels)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `x` where `mask` is true, and 0 if it is true nowhere."""
    return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)


def example_tokens(config: Any, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random tokens as `inputs` and `targets`, each int32[batch, sequence], the targets one token ahead."""
    tokens = jax.random.randint(key, (batch_size, config.sequence_length + 1), 0, config.vocab_size, dtype=jnp.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def example_images(config: Any, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random `images` [batch, height, width, 3] in the configuration's dtype, and `labels` int32[batch]."""
    image_key, label_key = jax.random.split(key)
    shape = batch_size, config.image_size, config.image_size, 3
    return {
        "images": jax.random.normal(image_key, shape, dtype=config.dtype),
        "labels": jax.random.randint(label_key, (batch_size,), 0, config.classes, dtype=jnp.int32),
    }
