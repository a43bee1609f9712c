"""Loops over layers on GPUs: gradients that are sent in the next iteration, and stacks that lie in another order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime import needed_nbytes
from autopar.tools import topologies
from autopar.tools.topologies import EXTRAS
from models import layers
from passes.cluster import parse_cluster
from passes.memory.gpu_peeling import FirstIteration
from passes.memory.operations import Operation, Operations
from tests.sample import slow

needs_gpu_compiler = pytest.mark.skipif(
    not topologies._is_installed(EXTRAS["gpu"][0]), reason="needs pip install 'autopar[gpu-compiler]'"
)
LAYERS, WIDTH, TOKENS, HEADS = 6, 512, 256, 8


def trained(layer: Any, params: Any, x: jax.Array, *, remat: bool) -> Any:
    """Parameters of layers in a loop after a step of plain SGD."""

    def loss(params: Any) -> jax.Array:
        step = jax.checkpoint(layer) if remat else layer
        y, _ = jax.lax.scan(lambda y, p: (y + step(p, y), None), x, params)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), params, jax.grad(loss)(params))


def mlp(remat: bool) -> tuple[Any, tuple[Any, ...]]:
    """Layers of two products, whose gradients are larger than what is kept of a few tokens."""
    shapes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    layer = lambda p, y: jnp.tanh(y @ p["up"]) @ p["down"]  # noqa: E731
    return lambda params, x: trained(layer, params, x, remat=remat), (
        params,
        jax.ShapeDtypeStruct((16 * TOKENS, WIDTH), "bfloat16"),
    )


def attention() -> tuple[Any, tuple[Any, ...]]:
    """Attention with a dimension for queries that share keys: the softmax that is kept lies as scores are made."""
    features = WIDTH // HEADS
    shapes = dict.fromkeys(("key", "value"), (LAYERS, WIDTH, HEADS, features))
    shapes |= {"query": (LAYERS, WIDTH, HEADS, 1, features), "out": (LAYERS, HEADS, 1, features, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    causal = np.tril(np.ones((TOKENS, TOKENS), bool))

    def layer(p: Any, y: jax.Array) -> jax.Array:
        query = jnp.einsum("btw,whgf->bthgf", y, p["query"])
        key, value = (jnp.einsum("btw,whf->bthf", y, p[name]) for name in ("key", "value"))
        return jnp.einsum("bthgf,hgfw->btw", layers.attend(query, key, value, causal), p["out"])

    return lambda params, x: trained(layer, params, x, remat=False), (
        params,
        jax.ShapeDtypeStruct((64, TOKENS, WIDTH), "bfloat16"),
    )


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("name", "cluster"),
    [("mlp", "8:h100"), ("attention", "8:h100"), slow("mlp", "8:a100-80g"), slow("attention", "8:a100-80g")],
)
def test_what_loops_carry_on_and_copy_is_in_the_peak_of_a_gpu(name: str, cluster: str) -> None:
    step, args = attention() if name == "attention" else mlp(remat=True)
    devices = autopar.topology(parse_cluster(cluster))
    step = autopar.parallelize(step, devices=devices, cluster=cluster, planner=autopar.Zero(3), donate_argnums=0)
    compiled = step.lower(*args).compile()
    assert 0.95 < compiled.plan.peak_nbytes / needed_nbytes(compiled.plan, compiled.memory_analysis()) < 1.10


def test_an_iteration_runs_before_a_loop_that_sends_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of one iteration stand before the loop, and its gradients are scattered after it."""
    seen: list[list[Operation]] = []
    around = FirstIteration.around

    def kept(self: FirstIteration, operations: Operations, *args: Any) -> list[int]:
        outputs = around(self, operations, *args)
        seen.append(list(operations.every))
        return outputs

    monkeypatch.setattr(FirstIteration, "around", kept)
    step, args = mlp(remat=True)
    autopar.parallelize(step, cluster="8:h100", planner=autopar.Zero(3), donate_argnums=0).plan(*args)
    every = seen[-1]
    (forward, backward) = (i for i, o in enumerate(every) if o.kind == "loop")
    kinds = [o.name if o.kind == "collective" else o.kind for o in every]
    assert kinds[forward:backward].count("dot") == 5  # one made again, two for activations and two for weights
    assert "reduce_scatter" not in kinds[:backward]
    assert kinds[backward:].count("reduce_scatter") == 2
    (made,) = (o for o in every[forward:backward] if o.name == "pending")
    assert [every[o].size for o in made.operands] == [4 * WIDTH * WIDTH] * 2
