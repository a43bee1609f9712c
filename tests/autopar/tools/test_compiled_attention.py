"""Attention by cuDNN, compiled by XLA's own GPU compiler: its memory and what is sent are those of the plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.runtime import needed_nbytes
from passes.cluster import parse_cluster
from tests.autopar.tools.test_compiled import PLANNERS, needs_gpu_compiler
from tests.sample import slow

WIDTH, TOKENS, HEADS, FEATURES, ROWS = 512, 1024, 8, 64, 16
MLP, VOCABULARY, LAYERS = 1408, 8192, 2

Params = dict[str, Any]


def shapes_of(heads: int) -> dict[str, tuple[int, ...]]:
    """The shapes of one block's weights, in which so many heads have keys and values of their own."""
    of_heads = {name: (WIDTH, n, FEATURES) for name, n in (("q", HEADS), ("k", heads), ("v", heads))}
    return of_heads | {"out": (HEADS, FEATURES, WIDTH), "up": (WIDTH, MLP), "gate": (WIDTH, MLP), "down": (MLP, WIDTH)}


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-5).astype(x.dtype)


def block(x: jax.Array, weights: Params, *masks: jax.Array) -> jax.Array:
    """A block of a LLaMA in bfloat16: attention by cuDNN, and a gated MLP."""
    weights, h = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights), normed(x)
    query, key, value = (jnp.einsum("btw,wnf->btnf", h, weights[name]) for name in "qkv")
    options: dict[str, Any] = {"mask": masks[0]} if masks else {"is_causal": True}
    heads = jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)
    x = x + jnp.einsum("btnf,nfw->btw", heads, weights["out"])
    h = normed(x)
    return x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]


def step_of(*, is_masked: bool = False, kept: bool = True, heads: int = HEADS) -> tuple[Any, tuple[Any, ...]]:
    """A step of two blocks by AdamW, and the types of what it takes."""
    shapes = {f"{name} {layer}": shape for layer in range(LAYERS) for name, shape in shapes_of(heads).items()}
    shapes |= {"embedding": (VOCABULARY, WIDTH), "logits": (WIDTH, VOCABULARY)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    optimizer = optax.adamw(1e-4)

    def loss(params: Params, tokens: jax.Array, *masks: jax.Array) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens]
        for layer in range(LAYERS):
            weights = {name: params[f"{name} {layer}"] for name in shapes_of(heads)}
            x = (block if kept else jax.checkpoint(block))(x, weights, *masks)
        logits = (normed(x) @ params["logits"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    def step(state: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    masks = (jax.ShapeDtypeStruct((ROWS, 1, TOKENS, TOKENS), "bool"),) * is_masked
    state = params, jax.eval_shape(optimizer.init, params)
    return step, (state, jax.ShapeDtypeStruct((ROWS, TOKENS), "int32"), *masks)


@needs_gpu_compiler
@pytest.mark.parametrize("planner", ["dp", slow("zero"), "megatron"])
@pytest.mark.parametrize(
    "options",
    [{}, slow({"is_masked": True}), slow({"kept": False, "heads": HEADS // 2})],
    ids=["causal", "masked", "recomputed, shared heads"],
)
@pytest.mark.parametrize("cluster", ["8:h100", slow("8:a100-80g")])
def test_a_gpus_compiler_agrees(cluster: str, options: dict[str, Any], planner: str) -> None:
    """Nothing is computed whole; peaks are 8 % too low to 10 % too high; products and collectives are the plan's."""
    step, arguments = step_of(**options)
    devices = autopar.topology(parse_cluster(cluster))
    parallel = autopar.parallelize(step, planner=PLANNERS[planner], devices=devices, cluster=cluster, donate_argnums=0)
    compiled: Any = parallel.lower(*arguments).compile()
    assert not compiled.plan.to_json()["replicated"]
    verification = compiled.verify()
    verification.check()
    assert verification.compiled_flops == pytest.approx(verification.planned_flops)
    needed = needed_nbytes(compiled.plan, compiled.memory_analysis())
    assert 0.92 < (ratio := compiled.plan.peak_nbytes / needed) < 1.1, ratio
