"""Positions of the largest and the least element are found in pieces: an accuracy gathers no logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend.extremes import by_extreme
from models import gpt
from tests.sample import slow

SMALL = gpt.Config(vocab_size=64, sequence_length=8, hidden=16, layers=1, heads=8)
LARGE = gpt.Config(vocab_size=8192, sequence_length=128, hidden=256, layers=1, heads=8, dtype="bfloat16")
POSITIONS = {"argmax": jnp.argmax, "argmin": jnp.argmin}
MEGATRON, ZERO = autopar.Megatron(data=2, tensor=4), autopar.Zero(3)


def step(config: gpt.Config, position: Callable[..., Any], params: Any, tokens: Any, labels: Any) -> Any:
    """A step of SGD on a summed loss, with the part of the tokens that are guessed."""

    def loss(params: Any) -> Any:
        logits = gpt.logits(config, params, tokens).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).sum(), (position(logits, -1) == labels).mean()

    (value, accuracy), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value, accuracy


@pytest.mark.parametrize(
    ("name", "planner"),
    [("argmax", MEGATRON), *(slow(*case) for case in (("argmin", MEGATRON), *itertools.product(POSITIONS, [ZERO])))],
)
def test_a_step_with_an_accuracy_is_jits(name: str, planner: Any):
    params = gpt.init(SMALL, jax.random.key(0))
    tokens, labels = jax.random.randint(jax.random.key(1), (2, 16, 8), 0, SMALL.vocab_size)
    fun = partial(step, SMALL, POSITIONS[name])
    compiled = autopar.parallelize(fun, planner=planner).lower(params, tokens, labels).compile()
    compiled.verify().check()
    for ours, theirs in zip(
        jax.tree.leaves(compiled(params, tokens, labels)),
        jax.tree.leaves(jax.jit(fun)(params, tokens, labels)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["argmax", slow("argmin")])
def test_an_accuracy_sends_no_logits(name: str):
    params = jax.eval_shape(partial(gpt.init, LARGE), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((64, LARGE.sequence_length), jnp.int32)
    fun = partial(step, LARGE, POSITIONS[name])
    plan = autopar.parallelize(fun, planner=MEGATRON, cluster="8:a100-80g").plan(params, tokens, tokens)
    activations = tokens.size * LARGE.hidden  # in two bytes on half of the devices
    assert all(c.nbytes <= activations for c in plan.collectives if "tensor" in c.axes)
    (found,) = (o.placement.results[0] for o in plan.operators if o.primitive == name)
    assert (found.partial, found.reduction) == (("tensor",), "min")


def test_a_comparison_of_booleans_is_as_it_was():
    flags = jnp.asarray(np.arange(64).reshape(8, 8) % 5 == 3)
    parallel = autopar.parallelize(lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)))
    for ours, theirs in zip(parallel(flags), (jnp.argmax(flags, 1), jnp.argmin(flags, 0)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_mask_of_positions_is_jits_in_microbatches():
    def loss(weights: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        mask = (jnp.argmax(targets, -1) != 0).astype(jnp.float32)
        crossed = -(targets * jax.nn.log_softmax(inputs @ weights)).sum(-1)
        return (crossed * mask).sum() / mask.sum()

    draw = np.random.default_rng(0)
    weights, inputs = (jnp.asarray(draw.normal(size=s), "float32") for s in ((8, 4), (16, 8)))
    targets = jnp.eye(4)[draw.integers(0, 4, 16)]
    gradient = jax.grad(loss)
    ours = autopar.parallelize(gradient, microbatches=2)(weights, inputs, targets)
    np.testing.assert_allclose(ours, jax.jit(gradient)(weights, inputs, targets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("in_axes", [0, 1, 2])
def test_positions_of_a_batch_are_jaxs(name: str, in_axes: int):
    x = jax.random.normal(jax.random.key(0), (4, 5, 6))
    taken = by_extreme(jax.make_jaxpr(partial(POSITIONS[name], axis=1))(x[0]).eqns[0])
    assert taken is not None
    batched = jax.vmap(lambda x: jax.core.eval_jaxpr(taken.jaxpr, taken.consts, x)[0], in_axes)
    moved = jnp.moveaxis(x, 0, in_axes)
    assert jnp.array_equal(batched(moved), POSITIONS[name](x, 2))
