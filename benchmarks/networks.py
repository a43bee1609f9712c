"""Small networks drawn at random, as train steps: what people write beside transformers.

Every block maps activations [batch, width] to [batch, width], so any can follow any other. A network is a stack of one
block, a stack of blocks drawn one by one, a U-Net, or two towers of one stack.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.lists import words

Shape = tuple[int, ...]
Apply = Callable[[Sequence[Any], Sequence[Any]], Any]
"""Activations from a block's parameters and from those of all blocks before it, the latest first, the input last."""

WIDTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
BATCHES = (16, 32, 64, 128, 256, 512)
LAYERS = tuple(range(2, 11))
TOKENS = 8
"""Places of a sequence, where a block reads its batch as one."""

_STATE_NBYTES = 4 * 2**30
"""Parameters and optimizer state at most, so that no plan is about memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A train step (state, batch) -> (state, loss) and the shapes that it is given."""

    name: str
    step: Callable[..., Any]
    state: Any
    batch: Any


@dataclass(frozen=True, slots=True)
class Block:
    """Shapes of a block's parameters for a width, and what it computes; all blocks that are `shared` have the same."""

    shapes: Callable[[int], tuple[Shape, ...]]
    apply: Apply
    shared: bool = False


def _square(count: int) -> Callable[[int], tuple[Shape, ...]]:
    return lambda width: ((width, width),) * count


def _tokens(h: Any) -> Any:
    """Activations [sequences, TOKENS, width]."""
    return h.reshape(-1, TOKENS, h.shape[-1])


def _norm(h: Any, axes: Any = -1) -> Any:
    centred = h - h.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axes, keepdims=True) + 1e-5)


def _gated(params: Sequence[Any], past: Sequence[Any]) -> Any:
    return jax.nn.sigmoid(past[0] @ params[1]) * (past[0] @ params[0])


def _highway(params: Sequence[Any], past: Sequence[Any]) -> Any:
    carry = jax.nn.sigmoid(past[0] @ params[1])
    return carry * jnp.tanh(past[0] @ params[0]) + (1 - carry) * past[0]


def _feed_forward(params: Sequence[Any], past: Sequence[Any]) -> Any:
    up, bias, down = params
    return past[0] + jax.nn.gelu(_norm(past[0]) @ up + bias) @ down


def _attention(params: Sequence[Any], past: Sequence[Any]) -> Any:
    h = _tokens(past[0])
    query, key, value = (split.reshape(*h.shape[:2], 16, -1) for split in (h @ w for w in params[:3]))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, value).reshape(h.shape)
    return past[0] + (mixed @ params[3]).reshape(past[0].shape)


def _mixer(params: Sequence[Any], past: Sequence[Any]) -> Any:
    h = _tokens(past[0])
    h = h + jnp.einsum("btw,ts,su->buw", _norm(h), params[0], params[1])
    h = h + jax.nn.gelu(_norm(h) @ params[2]) @ params[3]
    return h.reshape(past[0].shape)


def _recurrent(params: Sequence[Any], past: Sequence[Any]) -> Any:
    """A GRU over the places of each sequence."""
    of_input, of_hidden, bias = params
    h = jnp.swapaxes(_tokens(past[0]), 0, 1)

    def step(hidden: Any, x: Any) -> tuple[Any, Any]:
        reset, update, new = jnp.split(x @ of_input + bias, 3, axis=-1)
        reset_, update_, new_ = jnp.split(hidden @ of_hidden, 3, axis=-1)
        update = jax.nn.sigmoid(update + update_)
        hidden = update * hidden + (1 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + reset_) * new_)
        return hidden, hidden

    _, hidden = jax.lax.scan(step, jnp.zeros_like(h[0]), h)
    return jnp.swapaxes(hidden, 0, 1).reshape(past[0].shape)


def _convolution(params: Sequence[Any], past: Sequence[Any]) -> Any:
    """A convolution of images of 4 by 4 with batch normalisation, and a way around it."""
    kernel, scale, shift = params
    images = past[0].reshape(past[0].shape[0], 4, 4, -1)
    images_out = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    images_out = jax.nn.relu(_norm(images_out, (0, 1, 2)) * scale + shift)
    return past[0] + images_out.reshape(past[0].shape)


BLOCKS = {
    "plain": Block(_square(1), lambda p, h: jnp.tanh(h[0] @ p[0])),
    "biased": Block(lambda w: ((w, w), (w,)), lambda p, h: jax.nn.relu(h[0] @ p[0] + p[1])),
    "residual": Block(lambda w: ((w, w), (w,)), lambda p, h: h[0] + jax.nn.relu(h[0] @ p[0] + p[1])),
    "normed": Block(lambda w: ((w, w), (w,)), lambda p, h: h[0] + jax.nn.relu(_norm(h[0]) * p[1] @ p[0])),
    "gated": Block(_square(2), _gated),
    "skip": Block(_square(1), lambda p, h: jnp.tanh(h[0] @ p[0]) + h[-1]),
    "highway": Block(_square(2), _highway),
    "dense": Block(_square(1), lambda p, h: jnp.tanh(sum(h) @ p[0])),
    "shared": Block(_square(2), lambda p, h: jnp.tanh(h[0] @ p[len(h) % 2]), shared=True),
    "bottleneck": Block(lambda w: ((w, w // 4), (w // 4, w)), lambda p, h: h[0] + jax.nn.relu(h[0] @ p[0]) @ p[1]),
    "feed-forward": Block(lambda w: ((w, 2 * w), (2 * w,), (2 * w, w)), _feed_forward),
    "attention": Block(_square(4), _attention),
    "mixer": Block(lambda w: ((TOKENS, 32), (32, TOKENS), (w, 2 * w), (2 * w, w)), _mixer),
    "recurrent": Block(lambda w: ((w, 3 * w), (w, 3 * w), (3 * w,)), _recurrent),
    "convolution": Block(lambda w: ((3, 3, w // 16, w // 16), (w // 16,), (w // 16,)), _convolution),
}

KINDS = (*BLOCKS, "u-net", "siamese", "mixed", "mixed siamese")
OPTIMIZERS: dict[str, tuple[optax.GradientTransformation, int]] = {
    "sgd": (optax.sgd(1e-2), 0),
    "momentum": (optax.sgd(1e-2, momentum=0.9), 1),
    "adam": (optax.adam(1e-3), 2),
}
"""Optimizers, and how many arrays each keeps for a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The design of a random network; `network` makes it."""

    kind: str
    blocks: tuple[str, ...]
    width: int
    batch: int
    optimizer: str

    def __str__(self) -> str:
        blocks = "-".join(self.blocks) if self.kind.startswith("mixed") else str(len(self.blocks))
        return f"{self.kind} {blocks}, width {self.width}, batch {self.batch}, {self.optimizer}"

    def network(self) -> Network:
        """The train step, with shapes for arguments."""
        shapes, apply = _u_net(self) if self.kind == "u-net" else _stack(self)
        towers = 2 if self.kind.endswith("siamese") else 1
        optimizer, _ = OPTIMIZERS[self.optimizer]
        params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=_is_shape)
        x = jax.ShapeDtypeStruct((self.batch, self.width), jnp.float32)

        def loss(params: Any, batch: tuple[Any, ...]) -> Any:
            outputs = [apply(params, x) for x in batch[:towers]]
            return ((outputs[0] - (outputs[1] if towers == 2 else batch[-1])) ** 2).mean()

        def step(state: tuple[Any, Any], batch: tuple[Any, ...]) -> tuple[tuple[Any, Any], Any]:
            params, moments = state
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        state = params, jax.eval_shape(optimizer.init, params)
        return Network(name=str(self), step=step, state=state, batch=(x, x))


def drawn(seed: int, number: int) -> Design:
    """The network of that number; each number has its own, however many others are drawn."""
    rng = np.random.default_rng((seed, number))
    kind, optimizer = str(rng.choice(KINDS)), str(rng.choice(list(OPTIMIZERS)))
    layers, width, batch = int(rng.choice(LAYERS)), int(rng.choice(WIDTHS)), int(rng.choice(BATCHES))
    blocks = (kind,) * layers
    if kind not in BLOCKS:
        blocks = tuple(map(str, rng.choice(list(BLOCKS), layers)))
    if kind == "siamese":
        blocks = blocks[:1] * layers
    _, moments_per_weight = OPTIMIZERS[optimizer]
    while (
        4 * (1 + moments_per_weight) * sum(math.prod(s) for block in blocks for s in BLOCKS[block].shapes(width))
        > _STATE_NBYTES
    ):
        width //= 2
    return Design(kind=kind, blocks=blocks, width=width, batch=batch, optimizer=optimizer)


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def _stack(design: Design) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Shapes of parameters and the forward pass of blocks one after another."""
    blocks = [BLOCKS[name] for name in design.blocks]
    shared = next((list(block.shapes(design.width)) for block in blocks if block.shared), [])
    shapes = [[] if block.shared else list(block.shapes(design.width)) for block in blocks]

    def apply(params: Any, x: Any) -> Any:
        past = [x]
        for block, mine in zip(blocks, params[1:], strict=True):
            past.insert(0, block.apply(params[0] if block.shared else mine, past))
        return past[0]

    return [shared, *shapes], apply


def _u_net(design: Design) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Shapes of parameters and the forward pass of layers that get narrower, then wide again beside what they were."""
    half = max(1, len(design.blocks) // 2)
    widths = [design.width >> min(depth, 3) for depth in range(half + 1)]
    down = list(itertools.pairwise(widths))
    up = [(narrow, wide) for wide, narrow in reversed(down)]

    def apply(params: Any, x: Any) -> Any:
        past, h = list[Any](), x
        for kernel in params[0]:
            past.append(h)
            h = jax.nn.relu(h @ kernel)
        for kernel in params[1]:
            h = jax.nn.relu(h @ kernel) + past.pop()
        return h

    return [down, up], apply


def add_arguments(parser: argparse.ArgumentParser, count: int, clusters: Sequence[str]) -> None:
    """Adds the options of what is drawn, by default `count` networks, and of the `clusters` that it is planned for."""
    parser.add_argument(
        "--seed", default=0, type=int, metavar="N", help="of the random networks (default: %(default)s)"
    )
    parser.add_argument("--first", default=0, type=int, metavar="N", help="number of the first network (default: 0)")
    parser.add_argument("--count", default=count, type=int, metavar="N", help="networks (default: %(default)s)")
    parser.add_argument(
        "--clusters",
        default=tuple(clusters),
        type=words,
        metavar="A,B",
        help=f"each network is planned for each (default: {','.join(clusters)})",
    )
