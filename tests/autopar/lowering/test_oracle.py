"""Two lowerings of one plan, pieces under `shard_map` and wholes under constraints, give equal numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.lowering import build
from autopar.lowering.lower import Program
from benchmarks.partitioner import constrain
from models import gpt
from tests.sample import slow

CONFIG = gpt.Config(vocab_size=64, sequence_length=16, hidden=32, layers=1, heads=8, dropout=0.1)


def mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def train_step(params, inputs, targets):
        def loss(params):
            return jnp.mean((jnp.tanh(inputs @ params["up"]) @ params["down"] - targets) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    keys = jax.random.split(jax.random.key(0), 4)
    params = {"up": jax.random.normal(keys[0], (16, 64)), "down": jax.random.normal(keys[1], (64, 8))}
    return train_step, (params, jax.random.normal(keys[2], (32, 16)), jax.random.normal(keys[3], (32, 8)))


def transformer() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def train_step(params, batch, key):
        value, gradient = jax.value_and_grad(lambda params: gpt.loss(CONFIG, params, batch, key))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0)))
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(scale=0.2, size=s.shape), s.dtype), shapes)
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (2, 16, CONFIG.sequence_length)), jnp.int32)
    return train_step, (params, {"inputs": tokens[0], "targets": tokens[1]}, jax.random.key(2))


def run(program: Program, leaves: Sequence[Any]) -> tuple[Any, ...]:
    jitted = jax.jit(
        program.function,
        in_shardings=program.in_shardings,
        out_shardings=program.out_shardings,
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return jitted(*jax.device_put(leaves, list(program.in_shardings)))


@pytest.mark.parametrize("example", [mlp, slow(transformer)])
def test_both_lowerings_agree(example: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]):
    fun, arguments = example()
    step = autopar.parallelize(fun, planner=autopar.Megatron(data=2, tensor=4))
    traced, plan = step.trace(*arguments), step.plan(*arguments)
    assert {axis for c in plan.collectives for axis in c.axes} == {"data", "tensor"}
    leaves = jax.tree.leaves(arguments)
    pieces, wholes = (run(make(traced, plan, jax.devices()), leaves) for make in (build, constrain))
    for ours, theirs in zip(pieces, wholes, strict=True):
        assert ours.sharding == theirs.sharding
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
