"""Attention by cuDNN: sequences and heads are cut, whatever masks it, and the numbers stay; nothing brings the batch to
every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.autopar import cudnn_attention
from tests.autopar.cudnn_attention import attended
from tests.sample import half

BATCH, TOKENS, HEADS, FEATURES, WIDTH = 16, 16, 8, 8, 32

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]

MASKS: dict[str, Callable[[Params, Batch], dict[str, Any]]] = {
    "none": lambda params, batch: {},
    "causal": lambda params, batch: {"is_causal": True},
    "lengths": lambda params, batch: {"query_seq_lengths": batch["n"], "key_value_seq_lengths": batch["n"]},
    "a mask each": lambda params, batch: {"mask": batch["mask"]},
    "one mask": lambda params, batch: {"mask": batch["mask"][:1]},
    "learned": lambda params, batch: {"bias": params["bias"]},
    "learned by heads": lambda params, batch: {"bias": params["bias of heads"]},
    "learned and a mask": lambda params, batch: {"bias": params["bias"], "mask": batch["mask"]},
    "a window": lambda params, batch: {"is_causal": True, "local_window_size": (4, 0)},
}

PLANNERS = {
    "data parallel": (autopar.DataParallel(), {}),
    "microbatches": (autopar.DataParallel(), {"microbatches": 2}),
    "zero": (autopar.Zero(3), {}),
    "megatron": (autopar.Megatron(data=2, tensor=4), {}),
    "auto": (autopar.Auto(), {}),
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    cudnn_attention.install()


def arguments(shared: int = 1) -> tuple[Params, Batch]:
    """Weights and a batch; `shared` heads read the same keys and values."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int, scale: float = 0.3) -> jax.Array:
        return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.bfloat16)

    params = {
        "q": drawn(WIDTH, HEADS, FEATURES),
        "k": drawn(WIDTH, HEADS // shared, FEATURES),
        "v": drawn(WIDTH, HEADS // shared, FEATURES),
        "o": drawn(HEADS, FEATURES, WIDTH),
        "bias": drawn(1, 1, TOKENS, TOKENS),
        "bias of heads": drawn(1, HEADS, TOKENS, TOKENS),
    }
    mask = (rng.random((BATCH, 1, TOKENS, TOKENS)) > 0.3) | np.eye(TOKENS, dtype=bool)
    lengths = rng.integers(3, TOKENS, BATCH)
    return params, {
        "x": drawn(BATCH, TOKENS, WIDTH, scale=1.0),
        "mask": jnp.asarray(mask),
        "n": jnp.asarray(lengths, jnp.int32),
    }


def step_of(mask: str, *, kept: bool = True) -> Callable[[Params, Batch], Any]:
    """A step by gradients of a sum; attention is recomputed unless it is kept."""

    def loss(params: Params, batch: Batch) -> jax.Array:
        query, key, value = (jnp.einsum("bsd,dnh->bsnh", batch["x"], params[name]) for name in "qkv")
        options = MASKS[mask](params, batch)

        def mixed(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attended(query, key, value, **options)

        heads = (mixed if kept else jax.checkpoint(mixed))(query, key, value)
        return jnp.sum(jnp.einsum("bsnh,nhd->bsd", heads, params["o"]).astype(jnp.float32) ** 2)

    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        gradients = jax.grad(loss)(params, batch)
        return {name: params[name] - 1e-3 * gradients[name] for name in params}, gradients

    return step


def assert_cut_and_equal(step: Callable[[Params, Batch], Any], args: tuple[Params, Batch], planner: str) -> None:
    """Checks that a plan cuts the batch or heads, and that its gradients are those of `jax.jit`."""
    chosen, options = PLANNERS[planner]
    with cudnn_attention.HERE():
        expected = jax.jit(step)(*args)[1]
        parallel = autopar.parallelize(step, planner=chosen, **options)
        plan, gradients = parallel.plan(*args), parallel(*args)[1]
    assert not plan.to_json()["replicated"]
    if planner in ("data parallel", "microbatches"):
        assert {collective.kind for collective in plan.collectives} == {"all_reduce"}
    for name, gradient in gradients.items():
        largest = float(jnp.abs(expected[name]).max())
        np.testing.assert_allclose(
            np.asarray(gradient, np.float32), np.asarray(expected[name], np.float32), atol=0.02 * largest, err_msg=name
        )


@pytest.mark.parametrize(("planner", "mask"), half(list(PLANNERS), list(MASKS)))
def test_sequences_and_heads_are_cut(mask: str, planner: str) -> None:
    assert_cut_and_equal(step_of(mask), arguments(), planner)


@pytest.mark.parametrize("planner", ["data parallel", "megatron"])
def test_heads_that_share_keys_are_cut_together(planner: str) -> None:
    assert_cut_and_equal(step_of("causal"), arguments(shared=2), planner)


def test_recomputed_attention_is_cut() -> None:
    assert_cut_and_equal(step_of("causal", kept=False), arguments(), "data parallel")


def of_cluster(mask: str) -> autopar.Plan:
    """The data-parallel plan of a step for GPUs that are not here."""
    plan = autopar.parallelize(step_of(mask), cluster="8:h100", planner=autopar.DataParallel()).plan(*arguments())
    assert isinstance(plan, autopar.Plan)
    return plan


def test_a_cluster_of_gpus_needs_no_gpu_here() -> None:
    assert of_cluster("none").step_seconds > 0
    with pytest.raises(RuntimeError, match="cuDNN"):
        attended(*[jnp.zeros((2, 8, 2, 8), jnp.bfloat16)] * 3)
    with pytest.raises(RuntimeError, match="cuDNN"):
        autopar.parallelize(step_of("none"), cluster="8:tpu-v5e", planner=autopar.DataParallel()).plan(*arguments())


def test_a_mask_is_no_less_work_of_the_model() -> None:
    assert of_cluster("causal").flops == of_cluster("none").flops
