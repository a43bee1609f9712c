"""AlexNet in one column: five convolutions, which have most of the work, and three dense layers, most of the weights.

**Reference**: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), section 5 and its
footnote 1 for the sizes.
"""

from dataclasses import dataclass
from typing import Any, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import cross_entropy, dense_options, example_images, verify, verify_preset

PRESETS = ("tiny", "full")

# Side, stride and padding in pixels of each convolution; the convolutions that a pooling follows.
KERNELS = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))
POOLED = (0, 1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of an AlexNet and the precision it runs in.

    `channels` are the filters of the five convolutions. `dtype` is what activations are computed in, `param_dtype` what
    parameters are kept in; float64 needs `jax_enable_x64`.

    Raises ValueError if the image vanishes before the dense layers, there are not five positive numbers of channels, a
    size is not positive, or a dtype is not one of `models.layers.DTYPES`.
    """

    image_size: int
    channels: tuple[int, ...]
    hidden: int
    classes: int
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        verify(self)
        if len(self.channels) != 5 or min(self.channels) < 1:
            raise ValueError(f"channels={self.channels}: five sizes of at least 1 are needed")
        if self.sizes[-1] < 1:
            raise ValueError(f"image_size={self.image_size} is too small: nothing is left of it; take at least 63")

    @classmethod
    def tiny(cls) -> Self:
        """A model of 64-pixel images with 0.02 million parameters; every width is a multiple of 8, for 8 devices."""
        return cls(image_size=64, channels=(8, 16, 24, 24, 16), hidden=64, classes=8)

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration called `name` in `PRESETS`; `dataclasses.replace` changes a field of it.

        "full" is the paper's, for ImageNet. Raises ValueError, with the names there are, for any other name.
        """
        verify_preset("AlexNet", name, PRESETS)
        if name == "tiny":
            return cls.tiny()
        return cls(image_size=224, channels=(64, 192, 384, 384, 256), hidden=4096, classes=1000)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The side in pixels of each convolution's output, and of what the dense layers see."""
        first = (self.image_size - 7) // 4 + 1
        second, third = pooled(first), pooled(pooled(first))
        return first, second, third, third, third, pooled(third)


def pooled(size: int) -> int:
    """The side in pixels of a pooled image."""
    return (size - 3) // 2 + 1


class AlexNet(nn.Module):
    """Logits [batch, classes] of the labels of `images` [batch, height, width, 3]."""

    config: Config
    deterministic: bool = True

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        options = dense_options(config, nn.initializers.he_normal())
        x = images.astype(config.dtype)
        for i, (channels, (size, stride, padding)) in enumerate(zip(config.channels, KERNELS, strict=True)):
            x = nn.Conv(channels, (size, size), stride, padding, name=f"Conv_{i}", **options)(x)
            x = nn.relu(x)
            if i in POOLED:
                x = nn.max_pool(x, (3, 3), (2, 2))

        drop = nn.Dropout(config.dropout, deterministic=self.deterministic)
        x = nn.relu(nn.DenseGeneral(config.hidden, axis=(1, 2, 3), name="Dense_0", **options)(drop(x)))
        x = nn.relu(nn.Dense(config.hidden, name="Dense_1", **options)(drop(x)))
        return nn.Dense(config.classes, name="Dense_2", **dense_options(config, nn.initializers.normal(0.01)))(x)


def init(config: Config, key: jax.Array) -> Any:
    """Fresh parameters, a nested dict of arrays of `param_dtype`; `jax.eval_shape` gives their shapes alone."""
    images = jnp.zeros((1, config.image_size, config.image_size, 3), dtype=config.dtype)
    return AlexNet(config).init(key, images)["params"]


def logits(config: Config, params: Any, images: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Logits [batch, classes] of the labels of `images` [batch, height, width, 3].

    Dropout acts only if there is a `key` for it.
    """
    rngs = {"dropout": key} if key is not None and config.dropout else {}
    model = AlexNet(config, deterministic=not rngs)
    return cast(jax.Array, model.apply({"params": params}, images, rngs=rngs))


def loss(config: Config, params: Any, batch: dict[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats per image, a float32 scalar (float64 if the model computes in it).

    `batch` holds `images` [batch, height, width, 3] and `labels` int32[batch]. Dropout acts only if there is a `key`
    for it.
    """
    return cross_entropy(logits(config, params, batch["images"], key), batch["labels"]).mean()


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random `images` [batch, height, width, 3] and `labels` int32[batch]."""
    return example_images(config, batch_size, key)


def products(config: Config) -> list[tuple[int, int, int]]:
    """The products in one output feature, the output features, and the pixels that have them, [layers]."""
    *sizes, last = config.sizes
    convolutions = [
        (side * side * n, m, size * size)
        for (side, _, _), n, m, size in zip(KERNELS, (3, *config.channels), config.channels, sizes, strict=False)
    ]
    flat = last * last * config.channels[-1]
    dense = [(flat, config.hidden), (config.hidden, config.hidden), (config.hidden, config.classes)]
    return [*convolutions, *((n, m, 1) for n, m in dense)]


def parameters(config: Config) -> int:
    """The number of parameters."""
    return sum((n + 1) * m for n, m, _ in products(config))


def flops(config: Config, batch_size: int) -> float:
    """Floating-point operations of one training step; a multiply-add is two, and only products count.

    Each layer's products are done once forward and twice backward, but the first's, as images need no gradient, once.
    Products with padding count in full.
    """
    forward = [n * m * pixels for n, m, pixels in products(config)]
    return 2.0 * batch_size * (3 * sum(forward) - forward[0])
