"""Losses of single layers, which are no model of the zoo: what surrounds products in networks of many kinds."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SEQUENCES, LENGTH, WIDTH = 256, 64, 32
IMAGES = (64, 32, 32, 8)
NHWC = ("NHWC", "HWIO", "NHWC")

Loss = Callable[[Any, jax.Array], jax.Array]
"""The loss of weights and rows."""


def _causal(w: jax.Array, x: jax.Array) -> jax.Array:
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), jnp.einsum("bqd,bkd->bqk", x @ w, x), -1e9)
    return jnp.sum((jax.nn.softmax(scores) @ x) ** 2)


def _rotary(w: jax.Array, x: jax.Array) -> jax.Array:
    turned = x @ w
    angles = jnp.arange(LENGTH)[:, None] / 10.0 ** jnp.arange(0, WIDTH, 2)
    sine, cosine, first, second = jnp.sin(angles), jnp.cos(angles), turned[..., ::2], turned[..., 1::2]
    pairs = jnp.stack([first * cosine - second * sine, first * sine + second * cosine], -1)
    return jnp.sum(pairs.reshape(x.shape) ** 2)


def _gated(w: jax.Array, x: jax.Array) -> jax.Array:
    value, gate = jnp.split(x @ w, 2, -1)
    return jnp.sum((value * jax.nn.sigmoid(gate)) ** 2)


def _normed(w: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ w
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
    return jnp.sum(jax.nn.gelu(y) ** 2)


def _state_space(a: jax.Array, x: jax.Array) -> jax.Array:
    def join(early: Any, late: Any) -> Any:
        return early[0] * late[0], late[0] * early[1] + late[1]

    return jnp.sum(lax.associative_scan(join, (jnp.exp(-jax.nn.softplus(x * a)), x * a), axis=1)[1] ** 2)


def _wavelet(a: jax.Array, x: jax.Array) -> jax.Array:
    y, total = x * a, jnp.zeros(())
    for _ in range(4):
        even, odd = y[:, ::2], y[:, 1::2]
        total, y = total + jnp.sum((even - odd) ** 2), even + odd
    return total + jnp.sum(y**2)


def _messages(w: jax.Array, x: jax.Array) -> jax.Array:
    edges = jnp.arange(4 * len(x))
    sources, targets, nodes = edges * 7 % len(x), edges * 13 % len(x), x.reshape(len(x), -1)[:, :WIDTH] @ w
    sent = jax.nn.relu(nodes[sources] + nodes[targets])
    return jnp.sum(jax.ops.segment_sum(sent, targets, len(x)) ** 2)


def _adapted(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.nn.silu(x @ lax.stop_gradient(w) + (x @ w[:, :4]) @ w[:4] * 2) ** 2)


def _variational(w: jax.Array, x: jax.Array) -> jax.Array:
    mean, deviation = x @ w, jax.nn.softplus(x @ w.T)
    drawn = mean + deviation * jax.random.normal(jax.random.key(0), mean.shape)
    divergence = mean**2 + deviation**2 - jnp.log(deviation**2 + 1e-6)
    return jnp.sum((drawn @ w.T - x) ** 2) + jnp.sum(divergence)


def _coupled(w: jax.Array, x: jax.Array) -> jax.Array:
    volume = jnp.zeros(())
    for _ in range(4):
        fixed, changed = jnp.split(x, 2, -1)
        scale, shift = jnp.split(fixed @ w[: WIDTH // 2], 2, -1)
        scale = jnp.tanh(scale)
        x, volume = jnp.concatenate([changed * jnp.exp(scale) + shift, fixed], -1), volume + jnp.sum(scale)
    return jnp.sum(x**2) - volume


def _running_maximum(a: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.cummax(x * a, 1) ** 2)


def _running_mean(a: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum((jnp.cumsum(x * a, 1) / jnp.arange(1, LENGTH + 1)[:, None]) ** 2)


def _outer_products(w: jax.Array, x: jax.Array) -> jax.Array:
    keys = jax.nn.elu(x @ w) + 1
    return jnp.sum(jnp.einsum("bld,blde->ble", keys, jnp.cumsum(jnp.einsum("bld,ble->blde", keys, x), 1)) ** 2)


def _best_rows(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sort(x @ w, 1)[:, -8:] ** 2)


def _codes(table: jax.Array, x: jax.Array) -> jax.Array:
    nearest = ((x[:, :, None] - table) ** 2).sum(-1).argmin(-1)
    return jnp.sum((table[nearest] - x) ** 2)


def _transport(w: jax.Array, x: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    for _ in range(4):
        scores = scores - jax.nn.logsumexp(scores, 1, keepdims=True)
        scores = scores - jax.nn.logsumexp(scores, 2, keepdims=True)
    return jnp.sum(jnp.exp(scores) * scores)


def _tags(w: jax.Array, x: jax.Array) -> jax.Array:
    def follow(log_sum: jax.Array, scores: jax.Array) -> tuple[jax.Array, None]:
        return jax.nn.logsumexp(log_sum[:, :, None] + w, 1) + scores, None

    return jnp.sum(jax.nn.logsumexp(lax.scan(follow, x[:, 0], x[:, 1:].transpose(1, 0, 2))[0], -1))


def _contrast(w: jax.Array, x: jax.Array) -> jax.Array:
    rows = (x @ w).mean(1)
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(rows @ rows.T)))


def _transposed(kernel: jax.Array, images: jax.Array) -> jax.Array:
    return jnp.sum(lax.conv_transpose(images, kernel, (2, 2), "SAME", dimension_numbers=NHWC) ** 2)


def _strided(kernel: jax.Array, images: jax.Array) -> jax.Array:
    features = lax.conv_general_dilated(images, kernel, (2, 2), "SAME", dimension_numbers=NHWC)
    return jnp.sum(jax.nn.relu(features) ** 2)


def _window_means(w: jax.Array, images: jax.Array) -> jax.Array:
    return jnp.sum(lax.reduce_window(images @ w, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2)


def _enlarged(w: jax.Array, images: jax.Array) -> jax.Array:
    return jnp.sum(jax.image.resize(images @ w, (IMAGES[0], 2 * IMAGES[1], 2 * IMAGES[2], IMAGES[3]), "nearest") ** 2)


def _smooth(w: jax.Array, images: jax.Array) -> jax.Array:
    y = images @ w
    return jnp.sum(jnp.abs(y[:, 1:] - y[:, :-1])) + jnp.sum(jnp.abs(y[:, :, 1:] - y[:, :, :-1]))


def _maxout(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.einsum("bsd,dkh->bskh", x, w).max(2) ** 2)


def _mixture(params: Any, x: jax.Array) -> jax.Array:
    gates = jax.nn.softmax(x @ params["gate"])
    hidden = jax.nn.relu(jnp.einsum("bsd,edh->bseh", x, params["inner"]))
    return jnp.mean(jnp.einsum("bse,bseh,ehd->bsd", gates, hidden, params["outer"]) ** 2)


def _squeezed(params: Any, images: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(images, params["kernel"], (1, 1), "SAME", dimension_numbers=NHWC)
    scale = jax.nn.sigmoid(jax.nn.relu(y.mean((1, 2)) @ params["inner"]) @ params["outer"])
    return jnp.mean((y * scale[:, None, None]) ** 2)


def _pixel_normed(kernel: jax.Array, images: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=NHWC)
    return jnp.mean((y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-8)) ** 4)


def _curved(params: Any, x: jax.Array) -> jax.Array:
    def solution(point: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(point @ params["inner"]) @ params["middle"]) @ params["outer"]

    traces = jax.vmap(lambda point: jnp.trace(jax.hessian(solution)(point)))(x[:, 0, :2])
    return jnp.mean((traces - 1) ** 2)


def _perceptron(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x + jax.nn.gelu(x @ params["inner"]) @ params["outer"] + params["shift"]) ** 2)


def _recurrent(params: Any, x: jax.Array) -> jax.Array:
    def cell(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(state @ params["state"] + row @ params["row"])
        return state, state

    return jnp.mean(lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1] ** 2)


def _beside_queue(params: Any, x: jax.Array) -> jax.Array:
    rows = jnp.tanh(x[:, 0] @ params["key"])
    same = jnp.sum(rows * x[:, 1], -1, keepdims=True)
    logits = jnp.concatenate([same, rows @ lax.stop_gradient(params["queue"]).T], 1) / 0.07
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def _shared_keys(params: Any, x: jax.Array) -> jax.Array:
    query = (x @ params["query"]).reshape(SEQUENCES, LENGTH, 4, WIDTH // 4)
    key, value = ((x @ params[name])[:, :, None] for name in ("key", "value"))
    return jnp.mean(jax.nn.dot_product_attention(query, key, value, is_causal=True) ** 2)


def _float16(w: jax.Array, x: jax.Array) -> jax.Array:
    narrow = w.astype(jnp.float16)
    return jnp.mean((jax.nn.relu(x.astype(jnp.float16) @ narrow) @ narrow).astype(jnp.float32) ** 2)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    """An array without elements."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


_ROWS, _SQUARE, _SCALE = _float32(SEQUENCES, LENGTH, WIDTH), _float32(WIDTH, WIDTH), _float32(WIDTH)
_IMAGES, _KERNEL, _MIXING = _float32(*IMAGES), _float32(3, 3, *IMAGES[-1:] * 2), _float32(*IMAGES[-1:] * 2)
_EXPERTS = {"gate": _float32(WIDTH, 4), "inner": _float32(4, WIDTH, 64), "outer": _float32(4, 64, WIDTH)}
_SQUEEZED = {"kernel": _KERNEL, "inner": _float32(IMAGES[-1], 2), "outer": _float32(2, IMAGES[-1])}
_PERCEPTRON = {"inner": _float32(WIDTH, 128), "shift": _SCALE, "outer": _float32(128, WIDTH)}
_CELL = {"state": _SQUARE, "row": _SQUARE}
_QUEUE = {"key": _SQUARE, "queue": _float32(1024, WIDTH)}
_SHARED_KEYS = {"query": _SQUARE, "key": _float32(WIDTH, WIDTH // 4), "value": _float32(WIDTH, WIDTH // 4)}
_CURVED = {"inner": _float32(2, 64), "middle": _float32(64, 64), "outer": _float32(64)}

GRADIENTS: Mapping[str, tuple[Loss, tuple[Any, Any]]] = MappingProxyType(
    {
        "causal": (_causal, (_SQUARE, _ROWS)),
        "rotary": (_rotary, (_SQUARE, _ROWS)),
        "gated": (_gated, (_SQUARE, _ROWS)),
        "normed": (_normed, (_SQUARE, _ROWS)),
        "state-space": (_state_space, (_SCALE, _ROWS)),
        "wavelet": (_wavelet, (_SCALE, _ROWS)),
        "messages": (_messages, (_SQUARE, _ROWS)),
        "adapted": (_adapted, (_SQUARE, _ROWS)),
        "variational": (_variational, (_SQUARE, _ROWS)),
        "coupled": (_coupled, (_SQUARE, _ROWS)),
        "running-maximum": (_running_maximum, (_SCALE, _ROWS)),
        "running-mean": (_running_mean, (_SCALE, _ROWS)),
        "linear-attention": (_outer_products, (_SQUARE, _ROWS)),
        "best-rows": (_best_rows, (_SQUARE, _ROWS)),
        "codes": (_codes, (_SQUARE, _ROWS)),
        "transport": (_transport, (_SQUARE, _ROWS)),
        "tags": (_tags, (_SQUARE, _ROWS)),
        "contrast": (_contrast, (_SQUARE, _ROWS)),
        "transposed": (_transposed, (_KERNEL, _IMAGES)),
        "strided": (_strided, (_KERNEL, _IMAGES)),
        "window-means": (_window_means, (_MIXING, _IMAGES)),
        "enlarged": (_enlarged, (_MIXING, _IMAGES)),
        "smooth": (_smooth, (_MIXING, _IMAGES)),
        "maxout": (_maxout, (_float32(WIDTH, 4, WIDTH), _ROWS)),
        "mixture": (_mixture, (_EXPERTS, _ROWS)),
        "squeezed": (_squeezed, (_SQUEEZED, _IMAGES)),
        "pixel-normed": (_pixel_normed, (_KERNEL, _IMAGES)),
        "perceptron": (_perceptron, (_PERCEPTRON, _ROWS)),
        "recurrent": (_recurrent, (_CELL, _ROWS)),
        "beside-queue": (_beside_queue, (_QUEUE, _ROWS)),
        "shared-keys": (_shared_keys, (_SHARED_KEYS, _ROWS)),
        "float16": (_float16, (_SQUARE, _ROWS)),
        "curved": (_curved, (_CURVED, _ROWS)),
    }
)
"""Losses with the shapes of their weights and rows, by name."""
