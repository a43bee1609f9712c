"""Three train steps with their batches, compared with `jax.jit`'s three."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

STEPS = 3
BATCH = 16
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Relative to an array's largest entry."""


@dataclass(frozen=True)
class Training:
    """`step(state, *call)` is (state, loss); `options` are `jax.jit`'s."""

    step: Callable[..., tuple[Any, Any]]
    state: Any
    calls: tuple[tuple[Any, ...], ...]
    options: dict[str, Any] | None = None


def draw(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), dtype)


def batches(dtype: Any = jnp.float32) -> list[dict[str, jax.Array]]:
    """A regression's batches, one for each step."""
    return [
        {"inputs": draw(BATCH, 8, seed=i, dtype=dtype), "targets": draw(BATCH, 4, seed=99 + i, dtype=dtype)}
        for i in range(STEPS)
    ]


def images() -> list[dict[str, jax.Array]]:
    labels = np.random.default_rng(1).integers(0, 8, (STEPS, BATCH))
    return [{"image": draw(BATCH, 8, 8, 2, seed=i), "label": jnp.asarray(labels[i], jnp.int32)} for i in range(STEPS)]


def run(step: Callable[..., Any], training: Training) -> list[Any]:
    """(state, loss) after every step, arrays alone."""
    state, results = jax.tree.map(jnp.array, training.state), []
    for call in training.calls:
        state, loss = step(state, *call)
        results.append(jax.tree.map(np.asarray, without_keys((state, loss))))
    return results


def without_keys(tree: Any) -> Any:
    """The tree with a key's words in its place."""
    is_key = functools.partial(jnp.issubdtype, arg2=jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf, tree)


def assert_equals_jit(training: Training, planner: Any) -> None:
    options = training.options or {}
    ours = run(autopar.parallelize(training.step, planner=planner, **options), training)
    expected = run(jax.jit(training.step, **options), training)
    for number, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
            where = f"step {number}, {jax.tree_util.keystr(path)}"
            assert (x.shape, x.dtype) == (y.shape, y.dtype), where
            if y.dtype.name not in TOLERANCE:
                np.testing.assert_array_equal(x, y, where)
                continue
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y), where)
            x, y = np.nan_to_num(x), np.nan_to_num(y)
            error = np.max(np.abs(x - y), initial=0) / max(float(np.max(np.abs(y), initial=0)), 1e-30)
            assert error <= TOLERANCE[y.dtype.name], f"{where}: relative error {error:.1e}"
