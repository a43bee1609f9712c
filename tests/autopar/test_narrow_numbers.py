"""Arrays of less than a byte an element, and of none, run in pipelines and compiled programs as under `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from passes.rules import rules_of
from tests.autopar.random_plans import Dice
from tests.sample import each, slow

PIPELINES = (
    autopar.Pipeline(stages=2, microbatches=4),
    autopar.Megatron(data=2, tensor=2, pipeline=2, microbatches=4),
)
WEIGHTS = {name: jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i, name in enumerate("ab")}
BATCH = jax.random.normal(jax.random.key(2), (32, 16))
LABELS = jnp.arange(32) % 16


def updated(w: Any, x: jax.Array, scale: Any = 1.0) -> Any:
    gradients = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2 * scale))(w)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, w, gradients)


def kept(w: Any, q: jax.Array, x: jax.Array) -> Any:
    return updated(w, x, q.astype("float32").mean()), q


def read(w: Any, q: jax.Array, x: jax.Array) -> Any:
    return updated(w, x, q.astype("float32").mean())


def made(w: Any, q: jax.Array, x: jax.Array) -> Any:
    return updated(w, x), (w["a"] * 3).astype(q.dtype)


def made_of_rows(w: Any, q: jax.Array, x: jax.Array) -> Any:
    return updated(w, x), (x * 3).astype(q.dtype)


def assert_equal(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(np.asarray(a, "float32"), np.asarray(b, "float32"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("planner", "step", "dtype"),
    each(PIPELINES, (kept, read, made, made_of_rows), ("int4", "uint4", "float4_e2m1fn")),
)
def test_pipelines_take_numbers_of_less_than_a_byte(planner: Any, step: Callable[..., Any], dtype: str):
    args = WEIGHTS, jnp.ones(8).astype(dtype), BATCH
    assert_equal(autopar.parallelize(step, planner=planner)(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_a_compiled_program_takes_them_wherever_they_lie(dtype: str):
    q = jnp.arange(8).astype(dtype)
    parallel = autopar.parallelize(kept)
    compiled = parallel.lower(WEIGHTS, q, BATCH).compile()
    expected = jax.jit(kept)(WEIGHTS, q, BATCH)
    for given in (q, jax.device_put(q, jax.devices()[0]), compiled(WEIGHTS, q, BATCH)[1]):
        assert_equal(compiled(WEIGHTS, given, BATCH), expected)


def with_gradient_of_labels(w: Any, x: jax.Array, y: jax.Array) -> Any:
    """A step that hands back the gradient of integers, which has no elements."""

    def loss(w: Any, y: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(jnp.tanh(x @ w["a"]) @ w["b"])
        return -jnp.sum(jnp.take_along_axis(scores, y[:, None], 1))

    gradients, none = jax.grad(loss, argnums=(0, 1), allow_int=True)(w, y)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, w, gradients), none


@pytest.mark.parametrize(
    "planner",
    [PIPELINES[0], slow(PIPELINES[1]), autopar.DataParallel(), *(Dice(seed, (8,)) for seed in range(4))],
)
def test_gradients_without_elements_are_handed_back(planner: Any):
    args = WEIGHTS, BATCH, LABELS
    expected = jax.jit(with_gradient_of_labels)(*args)
    ours = autopar.parallelize(with_gradient_of_labels, planner=planner)(*args)
    assert_equal(ours, expected)


@pytest.mark.parametrize("planner", [slow(PIPELINES[0]), PIPELINES[1]])
def test_gradients_without_elements_go_through_a_step(planner: Any):
    def step(w: Any, none: Any, x: jax.Array) -> Any:
        return updated(w, x), none

    args = WEIGHTS, np.zeros((32,), jax.dtypes.float0), BATCH
    assert_equal(autopar.parallelize(step, planner=planner)(*args), jax.jit(step)(*args))


def test_no_strategy_leaves_sums_of_what_has_no_elements():
    graph = autopar.parallelize(with_gradient_of_labels).step(WEIGHTS, BATCH, LABELS).graph
    rules = [
        rule
        for node, rule in zip(graph.nodes, rules_of(graph), strict=True)
        if graph.types[node.outputs[0]].dtype == "float0"
    ]
    assert rules
    assert not any(factor.reduction for rule in rules for factor in rule.factors)
