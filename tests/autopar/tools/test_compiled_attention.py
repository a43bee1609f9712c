"""Attention by cuDNN, compiled by XLA's own GPU compiler: its memory and what is sent are those of the plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.runtime import needed_nbytes
from passes.cluster import parse_cluster
from tests.autopar.tools.test_compiled import PLANNERS, needs_gpu_compiler
from tests.sample import slow

WIDTH, TOKENS, HEADS, FEATURES, ROWS = 256, 512, 8, 32, 32


def step_of(*, is_masked: bool, kept: bool, heads: int) -> tuple[Any, tuple[Any, ...]]:
    """A step of one block of attention and a product, and the types of what it takes."""
    shapes = {"q": HEADS, "k": heads, "v": heads}
    weights = {name: jax.ShapeDtypeStruct((WIDTH, n, FEATURES), "bfloat16") for name, n in shapes.items()}
    weights["o"] = jax.ShapeDtypeStruct((HEADS, FEATURES, WIDTH), "bfloat16")
    weights["up"] = jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), "bfloat16")

    def mixed(weights: Any, x: jax.Array, *masks: jax.Array) -> jax.Array:
        query, key, value = (jnp.einsum("btw,wnf->btnf", x, weights[name]) for name in "qkv")
        options: dict[str, Any] = {"mask": masks[0]} if masks else {"is_causal": True}
        heads = jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)
        return x + jnp.einsum("btnf,nfw->btw", heads, weights["o"])

    def loss(weights: Any, *batch: jax.Array) -> jax.Array:
        after = (mixed if kept else jax.checkpoint(mixed))(weights, *batch)
        return jnp.sum(jax.nn.gelu(after @ weights["up"]).astype(jnp.float32) ** 2)

    def step(weights: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    x = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), "bfloat16")
    masks = (jax.ShapeDtypeStruct((ROWS, 1, TOKENS, TOKENS), "bool"),) * is_masked
    return step, (weights, x, *masks)


@needs_gpu_compiler
@pytest.mark.parametrize("planner", ["dp", slow("zero"), "megatron"])
@pytest.mark.parametrize(
    "options",
    [
        {"is_masked": False, "kept": True, "heads": HEADS},
        slow({"is_masked": True, "kept": True, "heads": HEADS}),
        slow({"is_masked": False, "kept": False, "heads": HEADS // 2}),
    ],
    ids=["causal", "masked", "recomputed, shared heads"],
)
@pytest.mark.parametrize("cluster", ["8:h100", slow("8:a100-80g")])
def test_a_gpus_compiler_agrees(cluster: str, options: dict[str, Any], planner: str) -> None:
    """Nothing is computed whole; peaks are within 10 %, and products and collectives are those of the plan."""
    step, arguments = step_of(**options)
    devices = autopar.topology(parse_cluster(cluster))
    parallel = autopar.parallelize(step, planner=PLANNERS[planner], devices=devices, cluster=cluster)
    compiled: Any = parallel.lower(*arguments).compile()
    assert not compiled.plan.to_json()["replicated"]
    verification = compiled.verify()
    verification.check()
    assert verification.compiled_flops == pytest.approx(verification.planned_flops)
    needed = needed_nbytes(compiled.plan, compiled.memory_analysis())
    assert 0.95 < (ratio := compiled.plan.peak_nbytes / needed) < 1.1, ratio
