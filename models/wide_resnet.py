"""Wide-ResNet: bottleneck blocks whose inner convolution is widened, with batch norm.

Unlike the other models, this one has state besides parameters: batch norm's running statistics. So `init` returns
(parameters, statistics), and `loss` takes both and returns (loss, new statistics), for `jax.value_and_grad(...,
has_aux=True)`.

**Reference**: Zagoruyko and Komodakis, "Wide Residual Networks" (2016); He et al., "Deep Residual Learning for Image
Recognition" (2016), table 1; Zheng et al., "Alpa" (OSDI 2022), whose factor widens the 3x3 convolution alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import cross_entropy, dense_options, example_images, precision_options, verify, verify_preset

# Depth -> blocks of each of the four stages; a block has three convolutions, and there are two more layers.
BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}

# The sizes that Alpa (OSDI 2022, and its repository) trains: name -> depth, base channels, width factor.
ALPA_SIZES = {
    "250M": (50, 160, 2),
    "500M": (50, 224, 2),
    "1B": (50, 320, 2),
    "2B": (50, 448, 2),
    "4B": (50, 640, 2),
    "6.8B": (50, 320, 16),
    "13B": (101, 320, 16),
}

PRESETS = ("tiny", *ALPA_SIZES)

EXPANSION = 4  # a block's output channels for each of its channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a Wide-ResNet and the precision it runs in.

    `base_channels` are those of the stem and of the first stage's blocks; each later stage doubles them. A block's 3x3
    convolution has `width_factor` times as many outputs. `dtype` is what activations are computed in, `param_dtype`
    what parameters are kept in; float64 needs `jax_enable_x64`.

    Raises ValueError if `depth` is not in `BLOCKS`, `image_size` is no multiple of 32, a size is not positive, or a
    dtype is not one of `models.layers.DTYPES`.
    """

    image_size: int
    classes: int
    depth: int
    base_channels: int
    width_factor: int
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        verify(self)
        if self.depth not in BLOCKS:
            raise ValueError(f"depth={self.depth}: choose one of {', '.join(map(str, BLOCKS))}")
        if self.image_size % 32:
            raise ValueError(f"image_size={self.image_size} is no multiple of 32: its side is halved five times")

    @classmethod
    def tiny(cls) -> Self:
        """A model of 32-pixel images with 0.2 million parameters; every width is a multiple of 8, for 8 devices."""
        return cls(image_size=32, classes=8, depth=14, base_channels=8, width_factor=2)

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration called `name` in `PRESETS`; `dataclasses.replace` changes a field of it.

        Raises ValueError, with the names there are, for any other name.
        """
        verify_preset("Wide-ResNet", name, PRESETS)
        if name == "tiny":
            return cls.tiny()
        depth, base, factor = ALPA_SIZES[name]
        return cls(image_size=224, classes=1024, depth=depth, base_channels=base, width_factor=factor)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Channels and stride of each block: a later stage's first halves the image and doubles the channels."""
        return tuple(
            (self.base_channels * 2**stage, 2 if stage and not block else 1)
            for stage, blocks in enumerate(BLOCKS[self.depth])
            for block in range(blocks)
        )


class Norm(nn.Module):
    """Batch norm over [batch, height, width], by the batch's statistics or, without `train`, the running ones."""

    config: Config
    train: bool
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale_init = nn.initializers.constant(self.scale)
        norm = nn.BatchNorm(not self.train, momentum=0.9, scale_init=scale_init, **precision_options(self.config))
        return norm(x)


class Block(nn.Module):
    """Three convolutions added to their input: [batch, height, width, channels in] -> [..., EXPANSION * channels].

    The last norm starts at zero, so that an untrained block passes its input on.
    """

    config: Config
    train: bool
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide, out = self.channels * self.config.width_factor, self.channels * EXPANSION
        y = convolution(self.config, self.channels, 1, name="narrow")(x)
        y = nn.relu(Norm(self.config, self.train, name="narrow_norm")(y))
        y = convolution(self.config, wide, 3, self.stride, name="wide")(y)
        y = nn.relu(Norm(self.config, self.train, name="wide_norm")(y))
        y = convolution(self.config, out, 1, name="out")(y)
        y = Norm(self.config, self.train, scale=0.0, name="out_norm")(y)
        if x.shape != y.shape:
            x = convolution(self.config, out, 1, self.stride, name="shortcut")(x)
            x = Norm(self.config, self.train, name="shortcut_norm")(x)
        return nn.relu(x + y)


class WideResNet(nn.Module):
    """Logits [batch, classes] of the labels of `images` [batch, height, width, 3]."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        x = convolution(config, config.base_channels, 7, 2, name="stem")(images.astype(config.dtype))
        x = nn.relu(Norm(config, self.train, name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for i, (channels, stride) in enumerate(config.blocks):
            x = Block(config, self.train, channels, stride, name=f"Block_{i}")(x)
        options = dense_options(config, nn.initializers.normal(0.01))
        return nn.Dense(config.classes, name="head", **options)(x.mean(axis=(1, 2)))


def convolution(config: Config, channels: int, size: int, stride: int = 1, *, name: str) -> nn.Conv:
    """A convolution to `channels` by kernels of `size` pixels squared; the image's side is divided by `stride`."""
    options = dense_options(config, nn.initializers.he_normal())
    return nn.Conv(channels, (size, size), stride, use_bias=False, name=name, **options)


def init(config: Config, key: jax.Array) -> tuple[Any, Any]:
    """Fresh parameters of `param_dtype` and running statistics of at least float32, each a nested dict of arrays."""
    images = jnp.zeros((1, config.image_size, config.image_size, 3), dtype=config.dtype)
    variables = WideResNet(config, train=True).init(key, images)
    exact = jnp.promote_types(config.dtype, jnp.float32)  # flax starts in float32 what it continues in float64
    return variables["params"], jax.tree.map(lambda x: x.astype(exact), variables["batch_stats"])


def logits(config: Config, params: Any, stats: Any, images: jax.Array) -> jax.Array:
    """Logits [batch, classes] of the labels of `images` [batch, height, width, 3], normalised by running statistics."""
    return cast(jax.Array, WideResNet(config, train=False).apply({"params": params, "batch_stats": stats}, images))


def loss(config: Config, params: Any, stats: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Mean cross-entropy in nats per image, a float32 scalar (float64 if so computed), and the new statistics.

    `batch` holds `images` [batch, height, width, 3] and `labels` int32[batch]. The loss depends on the statistics of
    the whole batch, and not on `stats`, which are only updated.
    """
    variables = {"params": params, "batch_stats": stats}
    predicted, new = WideResNet(config, train=True).apply(variables, batch["images"], mutable="batch_stats")
    return cross_entropy(predicted, batch["labels"]).mean(), new["batch_stats"]


def example_batch(config: Config, batch_size: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random `images` [batch, height, width, 3] and `labels` int32[batch]."""
    return example_images(config, batch_size, key)


class Convolution(NamedTuple):
    """The side of a convolution's kernels, its channels, and the side of its output."""

    size: int
    inputs: int
    outputs: int
    pixels: int


def convolutions(config: Config) -> Iterator[Convolution]:
    """Every convolution, the stem first."""
    yield Convolution(7, 3, config.base_channels, config.image_size // 2)
    inputs, pixels = config.base_channels, config.image_size // 4
    for channels, stride in config.blocks:
        wide, outputs = channels * config.width_factor, channels * EXPANSION
        yield Convolution(1, inputs, channels, pixels)
        shrunk = pixels // stride
        yield Convolution(3, channels, wide, shrunk)
        yield Convolution(1, wide, outputs, shrunk)
        if (inputs, pixels) != (outputs, shrunk):
            yield Convolution(1, inputs, outputs, shrunk)
        inputs, pixels = outputs, shrunk


def head(config: Config) -> int:
    """The number of weights of the last layer, without biases."""
    return config.base_channels * 8 * EXPANSION * config.classes


def parameters(config: Config) -> int:
    """The number of parameters: each convolution has weights, and a scale and a shift for every output channel."""
    weights = sum(size * size * n * m + 2 * m for size, n, m, _ in convolutions(config))
    return weights + head(config) + config.classes


def flops(config: Config, batch_size: int) -> float:
    """Floating-point operations of one training step; a multiply-add is two; only convolutions and products count.

    Each convolution is done once forward and twice backward, but the stem, as images need no gradient, once. Products
    with padding count in full.
    """
    stem, *others = (size * size * n * m * pixels * pixels for size, n, m, pixels in convolutions(config))
    return 2.0 * batch_size * (2 * stem + 3 * (sum(others) + head(config)))
