"""Weights that are kept in one array take the same time however they are taken out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.autopar.test_written_otherwise import LAYERS, PLANNERS, Weights, X, float32, loss, seconds, types

SLACK = 1.05
"""Most that a way may cost: each slice's derivative gets a dimension in a kernel of its own, and these are small."""
LEAVES, TREE = jax.tree.flatten(types())
SIZES = [math.prod(leaf.shape) for leaf in LEAVES]
STACKED = jax.tree.map(lambda *leaves: float32(len(leaves), *leaves[0].shape), *types())
FLAT = float32(sum(SIZES))


def unstacked(w: Weights) -> list[Weights]:
    layers = zip(*map(jnp.unstack, w.values()), strict=True)
    return [dict(zip(w, leaves, strict=True)) for leaves in layers]


def indexed(w: Weights) -> list[Weights]:
    return [{name: array[i] for name, array in w.items()} for i in range(LAYERS)]


def indexed_dynamically(w: Weights) -> list[Weights]:
    one = lambda i: lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False)  # noqa: E731
    return [jax.tree.map(one(i), w) for i in range(LAYERS)]


def shaped(parts: list[jax.Array]) -> list[Weights]:
    return jax.tree.unflatten(TREE, [part.reshape(leaf.shape) for part, leaf in zip(parts, LEAVES, strict=True)])


def split(vector: jax.Array) -> list[Weights]:
    return shaped(jnp.split(vector, [*accumulate(SIZES)][:-1]))


def sliced(vector: jax.Array) -> list[Weights]:
    ends = [*accumulate(SIZES)]
    return shaped([vector[end - size : end] for end, size in zip(ends, SIZES, strict=True)])


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: type(planner).__name__)
@pytest.mark.parametrize(
    ("way", "plain", "weights"),
    [(indexed, unstacked, STACKED), (indexed_dynamically, unstacked, STACKED), (sliced, split, FLAT)],
    ids=["indexed", "indexed dynamically", "sliced"],
)
def test_slices_cost_what_they_are(way: Callable[..., Any], plain: Callable[..., Any], weights: Any, planner: Any):
    """A vector sliced took 1.8 times as long as one that is split, with more for each of more layers."""
    taken = seconds(lambda w, x: loss(way(w), x), weights, X, planner)
    expected = seconds(lambda w, x: loss(plain(w), x), weights, X, planner)
    assert expected / SLACK <= taken <= SLACK * expected
