"""DLRM, which predicts clicks: large embedding tables, and small MLPs around the products of all pairs of features.

**Reference**: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(2019), section 2; the larger shape is that of MLPerf Training's benchmark.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.layers import at_least_float32, dense_options, embed_options, verify, verify_preset

# How many values each categorical feature has in the Criteo data sets, at most 40 million counted in the second.
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
TERABYTE_ROWS = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)

PRESETS = ("tiny", "1B", "24B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a DLRM and the precision it runs in.

    `rows` has the number of rows of each table. `bottom` and `top` are the features of the layers of the two MLPs; the
    last of `bottom` is also what a row of a table has, the last of `top` is the one logit. `dtype` is what activations
    are computed in, `param_dtype` what parameters are kept in; float64 needs `jax_enable_x64`.

    Raises ValueError if a size is not positive, there is no table, `top` does not end in 1, or a dtype is not one of
    `models.layers.DTYPES`.
    """

    rows: tuple[int, ...]
    dense_features: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        verify(self)
        for name in ("rows", "bottom", "top"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1:
                raise ValueError(f"{name}={sizes}: one or more sizes of at least 1 are needed")
        if self.top[-1] != 1:
            raise ValueError(f"top={self.top}: the last layer gives the one logit of a click, so it must end in 1")

    @classmethod
    def tiny(cls) -> Self:
        """A model of 0.1 million parameters; every table splits over 8 devices."""
        return cls(rows=(4096, 1024, 512, 256), dense_features=8, bottom=(32, 16), top=(32, 16, 1))

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration called `name` in `PRESETS`; `dataclasses.replace` changes a field of it.

        "1B" is for Criteo's Kaggle data, "24B" for its terabyte. Raises ValueError, with the names there are, for any
        other name.
        """
        verify_preset("DLRM", name, PRESETS)
        match name:
            case "1B":
                return cls(rows=padded(KAGGLE_ROWS), dense_features=13, bottom=(512, 256, 64, 32), top=(512, 256, 1))
            case "24B":
                return cls(
                    rows=padded(TERABYTE_ROWS),
                    dense_features=13,
                    bottom=(512, 256, 128),
                    top=(1024, 1024, 512, 256, 1),
                )
            case _:
                return cls.tiny()

    @property
    def embed_dim(self) -> int:
        """Features of a row of each table, and of the bottom MLP's output."""
        return self.bottom[-1]

    @property
    def pairs(self) -> int:
        """The number of pairs among the tables' rows and the bottom MLP's output."""
        return len(self.rows) * (len(self.rows) + 1) // 2


def padded(rows: Iterable[int]) -> tuple[int, ...]:
    """Each of `rows` up to a multiple of 64, so that tables split over devices."""
    return tuple(-(-n // 64) * 64 for n in rows)


class MLP(nn.Module):
    """Dense layers to each of `features` in turn, with a ReLU between: [batch, in] -> [batch, features[-1]]."""

    config: Config
    features: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = dense_options(self.config, nn.initializers.he_normal())
        for i, n in enumerate(self.features):
            x = nn.Dense(n, name=f"Dense_{i}", **options)(nn.relu(x) if i else x)
        return x


class DLRM(nn.Module):
    """The logit [batch] of a click, from `dense` [batch, features] and `categories` int32[batch, tables]."""

    config: Config

    @nn.compact
    def __call__(self, dense: jax.Array, categories: jax.Array) -> jax.Array:
        config = self.config
        bottom = nn.relu(MLP(config, config.bottom, name="bottom")(dense.astype(config.dtype)))
        features = [bottom]
        for i, n in enumerate(config.rows):
            table = nn.Embed(n, config.embed_dim, name=f"Table_{i}", **embed_options(config))
            features.append(table(categories[:, i]))

        stacked = jnp.stack(features, axis=1)
        products = jnp.einsum("bmd,bnd->bmn", stacked, stacked)
        rows, columns = np.tril_indices(len(features), -1)
        x = jnp.concatenate([bottom, products[:, rows, columns]], axis=1)
        return MLP(config, config.top, name="top")(x)[:, 0]


def init(config: Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    dense = jnp.zeros((1, config.dense_features), dtype=config.dtype)
    return DLRM(config).init(key, dense, jnp.zeros((1, len(config.rows)), dtype=jnp.int32))["params"]


def logits(config: Config, params: Any, dense: jax.Array, categories: jax.Array) -> jax.Array:
    """The logit [batch] of a click, from `dense` [batch, features] and `categories` int32[batch, tables]."""
    return cast(jax.Array, DLRM(config).apply({"params": params}, dense, categories))


def loss(config: Config, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean binary cross-entropy in nats, a float32 scalar (float64 if the model computes in it).

    `batch` holds `dense` [batch, features], `categories` int32[batch, tables], and `clicks` [batch], each 0 or 1.
    """
    predicted = at_least_float32(logits(config, params, batch["dense"], batch["categories"]))
    return optax.sigmoid_binary_cross_entropy(predicted, batch["clicks"].astype(predicted.dtype)).mean()


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random `dense` [batch, features], `categories` int32[batch, tables] and `clicks` [batch], half of them 1."""
    dense_key, category_key, click_key = jax.random.split(key, 3)
    shape = batch_size, len(config.rows)
    return {
        "dense": jax.random.normal(dense_key, (batch_size, config.dense_features), dtype=config.dtype),
        "categories": jax.random.randint(category_key, shape, 0, jnp.array(config.rows), dtype=jnp.int32),
        "clicks": jax.random.bernoulli(click_key, 0.5, (batch_size,)).astype(config.dtype),
    }


def matrices(config: Config) -> list[tuple[int, int]]:
    """The shape of each dense layer's matrix, first the bottom MLP's, then the top's."""
    top = (config.embed_dim + config.pairs, *config.top)
    return [*pairwise((config.dense_features, *config.bottom)), *pairwise(top)]


def parameters(config: Config) -> int:
    """The number of parameters, almost all of them in tables."""
    return sum(config.rows) * config.embed_dim + sum((n + 1) * m for n, m in matrices(config))


def flops(config: Config, batch_size: int) -> float:
    """Floating-point operations of one training step; a multiply-add is two, and only matrix products count.

    Each product is done once forward and twice backward, but the first, whose input needs no gradient, once. All pairs
    are multiplied, each of two features twice.
    """
    dense = matrices(config)
    interaction = (len(config.rows) + 1) ** 2 * config.embed_dim
    first = dense[0][0] * dense[0][1]
    return 2.0 * batch_size * (3 * (sum(n * m for n, m in dense) + interaction) - first)
