"""Mixture-of-experts GPT: each even block's MLP is one of many experts, of which every token takes its best two.

Tokens are routed inside groups of `group_size`, and an expert takes at most `capacity` tokens of a group; what exceeds
it skips the experts. Dispatch and combination are products with a tensor [groups, token, expert, slot], so that
splitting the groups outside and the experts inside makes an all-to-all of each. Unlike GShard's, the second expert is
never dropped at random.

**Reference**: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (ICLR
2021), section 2.2, algorithms 1 and 2.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import (
    MLP,
    NORMAL,
    Attention,
    at_least_float32,
    attention_parameters,
    causal,
    cross_entropy,
    dense_options,
    embed_options,
    example_tokens,
    mlp_parameters,
    precision_options,
    residual_init,
    verify,
    verify_divides,
    verify_preset,
    verify_tokens,
)

# The sizes that Alpa (OSDI 2022, and its repository) trains, and some between: name -> hidden, layers, heads, experts.
ALPA_SIZES = {
    "380M": (768, 8, 16, 8),
    "690M": (768, 8, 16, 16),
    "1.3B": (768, 16, 16, 16),
    "2.4B": (1024, 16, 16, 16),
    "7.1B": (1280, 16, 16, 32),
    "10B": (1536, 16, 16, 32),
    "27B": (2048, 16, 16, 48),
    "70B": (2048, 32, 16, 64),
    "140B": (2048, 32, 16, 128),
}

PRESETS = ("tiny", *ALPA_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a mixture-of-experts GPT and the precision it runs in.

    `auxiliary_weight` is the share of the load-balancing loss in the loss. `dtype` is what activations are computed in,
    `param_dtype` what parameters are kept in; float64 needs `jax_enable_x64`. With `remat`, each block's backward pass
    recomputes the block.

    Raises ValueError if `heads` does not divide `hidden`, there are not two experts to choose from or too many for a
    slot each, a size is not positive, or a dtype is not one of `models.layers.DTYPES`.
    """

    vocab_size: int
    sequence_length: int
    hidden: int
    layers: int
    heads: int
    experts: int
    group_size: int
    mlp_factor: int = 8
    auxiliary_weight: float = 0.01
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        verify(self)
        verify_divides(self, "heads", "hidden")
        if not 2 <= self.experts <= 2 * self.group_size:
            raise ValueError(
                f"experts={self.experts} is not in [2, {2 * self.group_size}]: a token takes two experts, and the two "
                f"choices of each of group_size={self.group_size} tokens fill at least one slot of every expert"
            )

    @classmethod
    def tiny(cls) -> Self:
        """A byte-level model of 5.0 million parameters; every dimension is a multiple of 8, for 8 devices."""
        return cls(vocab_size=256, sequence_length=128, hidden=128, layers=4, heads=8, experts=8, group_size=128)

    @classmethod
    def alpa(cls, name: str) -> Self:
        """A model as Alpa trains it: float16 over float32 parameters, every block recomputed in the backward pass.

        Raises KeyError if `name` is not in `ALPA_SIZES`.
        """
        hidden, layers, heads, experts = ALPA_SIZES[name]
        return cls(
            vocab_size=32000,
            sequence_length=1024,
            hidden=hidden,
            layers=layers,
            heads=heads,
            experts=experts,
            group_size=2048,
            dtype="float16",
            remat=True,
        )

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration called `name` in `PRESETS`; `dataclasses.replace` changes a field of it.

        Raises ValueError, with the names there are, for any other name.
        """
        verify_preset("MoE", name, PRESETS)
        return cls.tiny() if name == "tiny" else cls.alpa(name)

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads

    @property
    def capacity(self) -> int:
        """The slots of one expert for the tokens of one group: each expert's share of two choices a token."""
        return 2 * self.group_size // self.experts

    @property
    def sparse_layers(self) -> int:
        """The number of blocks with experts: every even one, counted from 0."""
        return (self.layers + 1) // 2


def gate(scores: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The weight of each token in each slot of each expert, and the load-balancing loss.

    From `scores` [groups, token, expert], softmaxed here, comes [groups, token, expert, slot]: not zero in at most two
    places a token, where the weights of its two best experts are scaled to a sum of 1; in at most one place a slot. The
    slots of an expert are filled by the tokens that rank it first, then by those that rank it second, each in order; a
    token that finds none left loses that choice. The loss is 1 when all experts are equally loaded, else mostly more:
    GShard's, times the square of the number of experts.
    """
    experts = scores.shape[-1]
    gates = nn.softmax(scores)
    first = nn.one_hot(gates.argmax(axis=-1), experts, dtype=bool)
    second = nn.one_hot(jnp.where(first, -1, gates).argmax(axis=-1), experts, dtype=bool)

    after_first = count_before(second) + first.sum(axis=1, keepdims=True, dtype=jnp.int32)
    rank = jnp.where(first, count_before(first), jnp.where(second, after_first, capacity))
    slots = nn.one_hot(rank, capacity, dtype=gates.dtype)  # a rank past the last slot gives zeros
    weights = gates / jnp.where(first | second, gates, 0).sum(axis=-1, keepdims=True)
    balance = experts * (first.mean(axis=1, dtype=gates.dtype) * gates.mean(axis=1)).sum(axis=-1).mean()
    return weights[..., None] * slots, balance


def count_before(chosen: jax.Array) -> jax.Array:
    """The number of earlier tokens that chose each expert, int32[groups, token, expert]."""
    return jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - chosen


class Experts(nn.Module):
    """Each token through its two experts, [batch, sequence, hidden] -> the same shape, and the load-balancing loss."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        groups = x.reshape(-1, config.group_size, config.hidden)
        scores = nn.Dense(config.experts, use_bias=False, name="gate", **dense_options(config))(groups)
        combine, balance = gate(at_least_float32(scores), config.capacity)
        combine = combine.astype(x.dtype)
        dispatch = (combine > 0).astype(x.dtype)

        wide = config.mlp_factor * config.hidden
        up = self.param("up", NORMAL, (config.experts, config.hidden, wide), jnp.dtype(config.param_dtype))
        ending = residual_init(config.layers)
        down = self.param("down", ending, (config.experts, wide, config.hidden), jnp.dtype(config.param_dtype))

        slots = jnp.einsum("gtes,gth->egsh", dispatch, groups)
        slots = nn.gelu(jnp.einsum("egsh,ehw->egsw", slots, up.astype(x.dtype)))
        slots = jnp.einsum("egsw,ewh->egsh", slots, down.astype(x.dtype))
        return jnp.einsum("gtes,egsh->gth", combine, slots).reshape(x.shape), balance


class Block(nn.Module):
    """Attention, then experts or an MLP, each normalised before and added to its input [batch, sequence, hidden].

    Returns the sum and the load-balancing loss, which is 0 without experts.
    """

    config: Config
    sparse: bool
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        drop = nn.Dropout(self.config.dropout, deterministic=self.deterministic)
        y = nn.LayerNorm(name="attention_norm", **precision_options(self.config))(x)
        x = x + drop(Attention(self.config, self.deterministic, name="attention")(y, causal(y.shape[1])))
        y = nn.LayerNorm(name="mlp_norm", **precision_options(self.config))(x)
        if not self.sparse:
            return x + drop(MLP(self.config, name="mlp")(y)), 0.0
        y, balance = Experts(self.config, name="experts")(y)
        return x + drop(y), balance


class MoE(nn.Module):
    """Logits [batch, sequence, vocabulary] of each next token, and the mean load-balancing loss, from tokens."""

    config: Config
    deterministic: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        embed = nn.Embed(config.vocab_size, config.hidden, name="embed", **embed_options(config))
        positions = self.param(
            "positions", NORMAL, (config.sequence_length, config.hidden), jnp.dtype(config.param_dtype)
        )
        x = embed(tokens) + positions.astype(config.dtype)
        x = nn.Dropout(config.dropout, deterministic=self.deterministic)(x)
        block = nn.remat(Block) if config.remat else Block
        balance = 0.0
        for i in range(config.layers):
            x, added = block(config, i % 2 == 0, self.deterministic, name=f"Block_{i}")(x)
            balance += added
        logits = embed.attend(nn.LayerNorm(name="norm", **precision_options(config))(x))
        return logits, jnp.asarray(balance / config.sparse_layers)


def init(config: Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    tokens = jnp.zeros((whole_groups(config), config.sequence_length), dtype=jnp.int32)
    return MoE(config).init(key, tokens)["params"]


def whole_groups(config: Config) -> int:
    """A small number of sequences whose tokens make whole groups, if there is one."""
    return ceil(config.group_size / config.sequence_length)


def logits(config: Config, params: Any, inputs: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Logits [batch, sequence, vocabulary] of the token after each of `inputs` int32[batch, sequence], and the balance.

    The latter is the load-balancing loss, a mean over the blocks with experts. Dropout acts only if there is a `key`
    for it. Raises ValueError if `inputs` has another sequence length than `config`, or no whole number of groups.
    """
    verify_tokens(config, "inputs", inputs)
    if inputs.size % config.group_size:
        raise ValueError(
            f"inputs has shape {list(inputs.shape)}: its {inputs.size} tokens are no whole number of groups of "
            f"group_size={config.group_size}; take another batch size"
        )
    rngs = {"dropout": key} if key is not None and config.dropout else {}
    model = MoE(config, deterministic=not rngs)
    return cast(tuple[jax.Array, jax.Array], model.apply({"params": params}, inputs, rngs=rngs))


def loss(config: Config, params: Any, batch: dict[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats per token plus `auxiliary_weight` times the load-balancing loss, a float32 scalar.

    It is float64 if the model computes in it. `batch` holds `inputs` and `targets`, each int32[batch, sequence].
    Dropout acts only if there is a `key` for it.
    """
    predicted, balance = logits(config, params, batch["inputs"], key)
    return cross_entropy(predicted, batch["targets"]).mean() + config.auxiliary_weight * balance


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random tokens as `inputs` and `targets`, each int32[batch, sequence], the targets one token ahead."""
    return example_tokens(config, batch_size, key)


def parameters(config: Config) -> int:
    """The number of parameters; the embedding counts once, as it is tied."""
    hidden, norm = config.hidden, 2 * config.hidden
    mlp = mlp_parameters(hidden, config.mlp_factor)
    experts = config.experts * (2 * config.mlp_factor * hidden * hidden + hidden)
    feeds = config.sparse_layers * experts + (config.layers - config.sparse_layers) * mlp
    attentions = config.layers * (attention_parameters(hidden) + 2 * norm)
    return attentions + feeds + norm + (config.vocab_size + config.sequence_length) * hidden


def flops(config: Config, batch_size: int) -> float:
    """Floating-point operations of one training step; a multiply-add is two, and only matrix products count.

    With k = 3, or 4 with `remat`, f = `mlp_factor`, E experts and G = `group_size`, a dense block takes k (B S H^2 (8 +
    4 f) + 4 B S^2 H), a block of experts k (8 B S H^2 + 4 B S^2 H + 8 B S H^2 f + 2 B S H E + 4 B S G + 8 B S H G), and
    the output projection 6 B S H V. The term 4 B S G is for weighting the slots, which is no matrix product here. Alpa
    counts the dispatch like any product, though it has a gradient for one operand only.

    **Reference**: Zheng et al., "Alpa" (OSDI 2022), the benchmarks of its repository.
    """
    tokens, hidden = batch_size * config.sequence_length, config.hidden
    attention = 8 * tokens * hidden**2 + 4 * tokens * config.sequence_length * hidden
    mlp = 4 * tokens * hidden**2 * config.mlp_factor
    routing = 2 * hidden * config.experts + 4 * config.group_size + 8 * hidden * config.group_size
    passes = 4 if config.remat else 3
    dense = (config.layers - config.sparse_layers) * (attention + mlp)
    sparse = config.sparse_layers * (attention + 2 * mlp + tokens * routing)
    return float(passes * (dense + sparse) + 6 * tokens * hidden * config.vocab_size)
