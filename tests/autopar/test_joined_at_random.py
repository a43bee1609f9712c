"""Random steps on batches that are joined: whatever is done with the rows, and however they are taken apart, the step
is `jax.jit`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.frontend import trace
from autopar.frontend.joined_batches import joined_batches
from tests.closeness import assert_close
from tests.sample import some

Array = jax.Array
Operation = Callable[[Array, Array, Array], Array]

BY_ROW: dict[str, Operation] = {
    "tanh": lambda h, w, key: jnp.tanh(h),
    "product": lambda h, w, key: jnp.tanh(h @ w),
    "of the transpose": lambda h, w, key: (w @ h.T).T,
    "layer norm": lambda h, w, key: (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1),
    "batch norm": lambda h, w, key: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1),
    "softmax over rows": lambda h, w, key: h + jax.nn.softmax(h, axis=0),
    "dropout": lambda h, w, key: jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0),
    "noise": lambda h, w, key: h + 0.1 * jax.random.normal(key, (len(h), 1)),
    "halves": lambda h, w, key: jnp.tanh(h.reshape(-1, h.shape[1] // 2) @ w[: len(w) // 2, : len(w) // 2]).reshape(
        h.shape
    ),
    "elements": lambda h, w, key: jnp.tanh(h.reshape(-1, 1) * w[0]).sum(-1).reshape(h.shape),
    "scan over layers": lambda h, w, key: lax.scan(lambda c, x: (jnp.tanh(c @ x), None), h, jnp.stack([w, w.T]))[0],
    "dropout in a scan": lambda h, w, key: lax.scan(
        lambda c, k: (jnp.where(jax.random.bernoulli(k, 0.8, c.shape), jnp.tanh(c @ w), 0), None),
        h,
        jax.random.split(key, 2),
    )[0],
    "branch": lambda h, w, key: lax.cond((h**2).sum() > 1, lambda x: x * 1.1, jnp.tanh, h),
    "fori loop": lambda h, w, key: lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ w), h),
    "vmap": lambda h, w, key: jax.vmap(lambda x: x @ w + jnp.max(x))(h),
    "a key a row": lambda h, w, key: jax.vmap(lambda x, k: x * jax.random.bernoulli(k, 0.8, x.shape))(
        h, jax.random.split(key, len(h))
    ),
    "recomputed": lambda h, w, key: jax.checkpoint(lambda h, w: jnp.tanh(h @ w) @ w)(h, w),
    "convolution": lambda h, w, key: lax.conv_general_dilated(h[:, None], jnp.full((1, 1, 3), 0.3), (1,), "SAME")[:, 0],
}
"""Operations that treat all rows alike, or add them up."""

BY_PLACE: dict[str, Operation] = {
    "sorted": lambda h, w, key: h + 0.1 * jnp.sort(h, axis=0),
    "added up in order": lambda h, w, key: h + 0.05 * jnp.cumsum(h, axis=0),
    "reversed": lambda h, w, key: h + 0.3 * h[::-1],
    "rolled": lambda h, w, key: h + 0.3 * jnp.roll(h, 1, axis=0),
    "weighed by place": lambda h, w, key: h * (1 + jnp.arange(len(h))[:, None] / len(h)),
    "picked": lambda h, w, key: h + 0.2 * h[(jnp.arange(len(h)) * 3 + 1) % len(h)],
    "one row": lambda h, w, key: h + 0.3 * h[5],
    "one row, dynamic": lambda h, w, key: h + lax.dynamic_slice(h, (3, 0), (1, h.shape[1])),
    "rows written": lambda h, w, key: h.at[2].set(0.5).at[jnp.array([1, len(h) - 1])].add(0.1),
    "rows overwritten": lambda h, w, key: lax.dynamic_update_slice(h, 0.5 * h[:2], (len(h) // 2 - 1, 0)),
    "the largest": lambda h, w, key: h + 0.1 * jnp.take_along_axis(h, jnp.argmax(h, axis=0)[None], axis=0),
    "compared with others": lambda h, w, key: h + 0.1 * jax.nn.softmax(h @ h.T - 1e9 * jnp.eye(len(h))) @ h,
    "scan over rows": lambda h, w, key: lax.scan(lambda c, x: ((c + x) * 0.5, c + x), jnp.zeros_like(h[0]), h)[1],
    "reversed in a scan": lambda h, w, key: lax.scan(
        lambda c, x: (jnp.tanh(c @ x) + 0.1 * c[::-1], None), h, jnp.stack([w, w.T])
    )[0],
    "sums of segments": lambda h, w, key: h + 0.1 * jax.ops.segment_sum(h, jnp.arange(len(h)) % 3, 3).sum(0),
    "first rows scaled": lambda h, w, key: h.at[: len(h) // 4].mul(0.5),
    "shifted": lambda h, w, key: h + 0.1 * jnp.concatenate([h[1:], h[:1]]),
    "padded": lambda h, w, key: h + 0.2 * jnp.pad(h[len(h) // 2 :], ((len(h) // 2, 0), (0, 0))),
    "the largest of columns": lambda h, w, key: h + lax.top_k(h.T, 3)[0].sum(1),
    "one-hot places": lambda h, w, key: h + jax.nn.one_hot(jnp.arange(len(h)) % h.shape[1], h.shape[1]),
    "convolution over rows": lambda h, w, key: (
        lax.conv_general_dilated(
            h.T[None], jnp.full((h.shape[1], 1, 3), 0.2), (1,), "SAME", feature_group_count=h.shape[1]
        )[0].T
    ),
}
"""Operations for which the place of a row matters."""

OPERATIONS = tuple((BY_ROW | BY_PLACE).values())


pytestmark = pytest.mark.usefixtures("float64")


def drawn(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step that joins batches of drawn sizes, does what is drawn with the rows, and takes them apart; its arguments.

    Mostly rows are treated alike: what asks for their places often makes it not worth to join them in groups.
    """
    draw = np.random.default_rng(seed)
    rows, width = int(draw.choice([8, 16])), int(draw.choice([4, 6, 8, 16]))
    times = [1, 1] if draw.random() < 0.5 else [int(n) for n in draw.choice([1, 1, 2, 3], size=draw.integers(2, 4))]
    among = tuple(BY_ROW.values()) if draw.random() < 0.6 else OPERATIONS
    chosen = [among[i] for i in draw.integers(0, len(among), size=draw.integers(2, 6))]
    how, apart, is_returned = draw.integers(0, 3), draw.integers(0, 5), draw.random() < 0.3
    ends = [int(end) * rows for end in np.cumsum(times)]
    parts = {
        0: [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)],
        1: [slice(0, rows), slice(rows, None)],
        2: [slice(0, rows - 1), slice(rows - 1, None)],
    }

    def joined(batches: list[Array]) -> Array:
        if how == 1 and len(set(times)) == 1:
            return jnp.stack(batches).reshape(ends[-1], width)
        if how == 2 and len(batches) > 2:
            return jnp.concatenate([batches[0], jnp.concatenate(batches[1:])])
        return jnp.concatenate(batches)

    def step(weights: list[Array], batches: list[Array], key: Array) -> Any:
        def loss(weights: list[Array]) -> Any:
            h = joined(batches)
            for number, operation in enumerate(chosen):
                h = operation(h, weights[number], jax.random.fold_in(key, number))
            taken = jnp.split(h, ends[:-1]) if apart == 3 else [h[part] for part in parts.get(apart, [slice(None)])]
            total = sum(((number + 1) * part**2).sum() for number, part in enumerate(taken))
            return total + (taken[0][:2] * taken[-1][-2:]).sum(), h

        (value, h), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return [w - 0.01 * g for w, g in zip(weights, grads, strict=True)], value, h if is_returned else 0

    weights = [0.4 * draw.normal(size=(width, width)) for _ in chosen]
    batches = [draw.normal(size=(n * rows, width)) for n in times]
    return step, (weights, batches, jax.random.key(seed))


@pytest.mark.parametrize("seed", some(range(200), 8))
def test_joined_batches_give_the_step_of_jit(seed: int):
    step, arguments = drawn(seed)
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), batch_argnums=1)
    assert_close(parallel(*arguments), jax.jit(step)(*arguments))


def test_some_of_these_steps_join_in_groups_and_some_do_not():
    steps = (drawn(seed) for seed in range(12))
    graphs = [trace(step, arguments, {}, batch_argnums=1) for step, arguments in steps]
    changed = [joined_batches(traced.graph, traced.state_pairs, traced.named) is not None for traced in graphs]
    assert 3 <= sum(changed) < len(changed)
