"""Optimizers of optax, unmodified: three train steps equal to `jax.jit`'s three."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import autopar
from tests.autopar.trainings import Training, assert_equals_jit, batches, draw


def warm() -> Any:
    return optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10)


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim == 2, tree)


def labels(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", tree)


def injected() -> Any:
    return optax.inject_hyperparams(optax.adamw)(learning_rate=warm(), weight_decay=1e-2)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd momentum": lambda: optax.sgd(warm(), momentum=0.9, nesterov=True),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warm(), mask=matrices)),
    "adafactor": lambda: optax.adafactor(warm(), min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(warm(), weight_decay=1e-2),
    "lion": lambda: optax.lion(warm()),
    "multi transform": lambda: optax.multi_transform({"matrix": optax.adam(warm()), "rest": optax.sgd(1e-2)}, labels),
    "masked": lambda: optax.chain(optax.masked(optax.add_decayed_weights(1e-2), matrices), optax.sgd(warm())),
    "many small steps": lambda: optax.MultiSteps(optax.adam(warm()), every_k_schedule=2),
    "apply if finite": lambda: optax.apply_if_finite(optax.sgd(warm(), momentum=0.9), max_consecutive_errors=2),
    "injected hyperparameters": injected,
    "noise and centralization": lambda: optax.chain(
        optax.centralize(), optax.add_noise(1e-3, 0.55, 0), optax.sgd(warm())
    ),
    "accumulated average": lambda: optax.chain(optax.adagrad(warm()), optax.ema(0.9)),
}
"""Each with a schedule somewhere."""


def regression(tx: Any, kept: Callable[[Any], Any] | None = None) -> Training:
    """Two layers trained by `tx` in float64; `kept` makes of parameters what `tx` keeps, which has them as `fast`.

    Ratios such as Adam's turn the rounding of a gradient near zero into steps of full size, which in float32 no order
    of summation keeps; in float64 what is left is far below the tolerance.
    """

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            hidden = jax.nn.gelu(batch["inputs"] @ params["up"] + params["bias"])
            return jnp.mean((hidden @ params["down"] * params["scale"] - batch["targets"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params.fast if kept else params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), (value, optax.tree.norm(grads))

    make = functools.partial(draw, dtype=jnp.float64, scale=0.3)
    params = {"up": make(8, 32), "bias": make(32, seed=1), "down": make(32, 4, seed=2), "scale": make(4, seed=3)}
    params = kept(params) if kept else params
    return Training(train_step, (params, tx.init(params)), tuple((batch,) for batch in batches(jnp.float64)))


QUICK = {"adafactor", "multi transform", "masked", "many small steps"}
"""The optimizers of a default run, in which LAMB has the batch cut."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in OPTIMIZERS])
def test_optimizer_equals_jit(name: str):
    with jax.enable_x64(True):
        assert_equals_jit(regression(OPTIMIZERS[name]()), autopar.Auto())


@pytest.mark.parametrize(
    "name", ["lamb", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adafactor", "many small steps"))]
)
def test_optimizer_equals_jit_with_the_batch_cut(name: str):
    with jax.enable_x64(True):
        assert_equals_jit(regression(OPTIMIZERS[name]()), autopar.DataParallel())


def test_muon_equals_jit():
    if not hasattr(optax.contrib, "muon"):
        pytest.skip("this optax has no muon")
    with jax.enable_x64(True):
        assert_equals_jit(regression(optax.contrib.muon(warm(), ns_steps=2)), autopar.Auto())


def test_lookahead_equals_jit():
    """Its parameters are pairs: the gradient is taken at the fast ones."""
    tx = optax.lookahead(optax.adam(warm()), sync_period=2, slow_step_size=0.5)
    with jax.enable_x64(True):
        assert_equals_jit(regression(tx, optax.LookaheadParams.init_synced), autopar.Auto())


def test_a_step_that_is_not_finite_is_skipped():
    with jax.enable_x64(True):
        training = regression(OPTIMIZERS["apply if finite"]())
        (first,), *rest = training.calls
        broken = {**first, "inputs": first["inputs"].at[3, 2].set(jnp.nan)}
        assert_equals_jit(replace(training, calls=((broken,), *rest)), autopar.Auto())
