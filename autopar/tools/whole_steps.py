"""The slowdown of operators in whole training steps, with every device at a step of its own.

In a program an operator finds its arrays in farther caches, is one of hundreds that a thread pool starts, and is
written by a compiler that has laid out arrays for others. No sweep of single operators sees that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.api import parallelize
from autopar.jax_compat import Device
from autopar.lowering import device_mesh
from autopar.tools.chains import clock_of
from autopar.tools.device_sweep import Sample, single_plan
from passes.cluster import Cluster, Mesh, what_if

KIND = "training steps"
LAYERS = 2
"""Blocks of a step: an operator of the second one finds its arrays where a program leaves them."""
VOCABULARY = 256
RATE = 1e-3
"""The learning rate: small, so that numbers stay as large as they are."""

WARM, RUNS, CALLS = 2, 5, 4
"""Calls before any is timed; the runs of which the median counts; and calls of each: steps of milliseconds are too
short for a clock of the process's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A training by SGD with momentum of `LAYERS` transformer blocks, on one device."""

    hidden: int
    sequence: int
    batch: int = 1
    head: int = 16
    dtype: str = "float32"

    @property
    def size(self) -> str:
        """It in words."""
        return f"{LAYERS} blocks of {self.hidden}, {self.batch} x {self.sequence} tokens"

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any], jax.ShapeDtypeStruct]:
        """The types of weights, moments and tokens."""
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, h), "logits": (h, VOCABULARY)}
        for layer in range(LAYERS):
            of_block = {"qkv": (h, 3 * h), "out": (h, h), "up": (h, 4 * h), "down": (4 * h, h), "scale": (h,)}
            shapes |= {f"{name}_{layer}": shape for name, shape in of_block.items()}
        weights = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}
        return weights, weights, jax.ShapeDtypeStruct((self.batch, self.sequence), "int32")

    def step(self, weights: dict[str, Any], moments: dict[str, Any], tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        """The next weights and moments, and the loss."""
        loss, gradients = jax.value_and_grad(self.loss)(weights, tokens)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda w, m: w - RATE * m, weights, moments), moments, loss

    def loss(self, weights: dict[str, Any], tokens: jax.Array) -> jax.Array:
        """The mean cross entropy of each token by those before it."""
        x = weights["embedding"][tokens]
        for layer in range(LAYERS):
            of_block = {name: weights[f"{name}_{layer}"] for name in ("qkv", "out", "up", "down", "scale")}
            x = x + self._attention(_normed(x) * of_block["scale"], of_block)
            x = x + jax.nn.gelu(_normed(x) @ of_block["up"]) @ of_block["down"]
        logits = jax.nn.log_softmax((_normed(x) @ weights["logits"]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1))

    def _attention(self, x: jax.Array, weights: dict[str, Any]) -> jax.Array:
        heads = (self.batch, self.sequence, self.hidden // self.head, self.head)
        query, key, value = (part.reshape(heads) for part in jnp.split(x @ weights["qkv"], 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(self.head)
        causal = jnp.tril(jnp.ones((self.sequence, self.sequence), bool))
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(x.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", shares, value).reshape(x.shape) @ weights["out"]


def _normed(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def transformers(platform: str) -> tuple[Transformer, ...]:
    """The trainings that are measured: on a CPU small ones, as its devices are threads of a few cores."""
    if platform == "cpu":
        return tuple(Transformer(hidden=h, sequence=s, batch=2) for h, s in ((64, 64), (128, 128), (256, 128)))
    of_hidden = (1024, 2048)
    return tuple(Transformer(hidden=h, sequence=1024, batch=4, head=64, dtype="bfloat16") for h in of_hidden)


def slowed(cluster: Cluster, mesh: Mesh, devices: Sequence[Device]) -> tuple[Cluster, tuple[Sample, ...]]:
    """The cluster whose operators take as many times as long as trainings do, beside what it predicts of each.

    It is one factor for all, the geometric mean: trainings do not tell which operator has lost what.
    """
    several = transformers(devices[0].platform)
    spent = [seconds(training, mesh, devices) for training in several]
    steps = [parallelize(training.step).step(*training.arguments()) for training in several]
    before = [single_plan(step, cluster).step_seconds for step in steps]
    factor = statistics.geometric_mean([s / p for s, p in zip(spent, before, strict=True)])
    group = cluster.group()
    result = replace(cluster, groups=(replace(group, device=what_if.slower_device(group.device, factor)),))
    samples = (
        Sample(kind=KIND, size=training.size, predicted=single_plan(step, result).step_seconds, measured=measured)
        for training, step, measured in zip(several, steps, spent, strict=True)
    )
    return result, tuple(samples)


def seconds(training: Transformer, mesh: Mesh, devices: Sequence[Device]) -> float:
    """Median seconds of a training's step while every device of a mesh takes one of its own."""
    clock, cores = clock_of(devices)
    rng, count = np.random.default_rng(0), len(devices)
    real = device_mesh(mesh, devices) if mesh.axes else jax.sharding.Mesh(np.array(devices), ("d",))
    spec = PartitionSpec("d")

    def drawn(struct: jax.ShapeDtypeStruct) -> jax.Array:
        is_whole = np.issubdtype(struct.dtype, np.integer)
        draw = rng.integers(0, VOCABULARY, struct.shape) if is_whole else rng.normal(scale=0.02, size=struct.shape)
        return jax.device_put(jnp.asarray(np.stack([draw] * count), struct.dtype), NamedSharding(real, spec))

    def local(*each: Any) -> Any:
        return jax.tree.map(lambda x: x[None], training.step(*jax.tree.map(lambda x: x[0], each)))

    specs = (spec, spec, spec)
    run = jax.jit(
        jax.shard_map(local, mesh=real, in_specs=specs, out_specs=specs, check_vma=False), donate_argnums=(0, 1)
    )
    weights, moments, tokens = jax.tree.map(drawn, training.arguments())
    runs: list[float] = []
    for number in range(WARM + RUNS):
        start = clock()
        for _ in range(CALLS):
            weights, moments, loss = run(weights, moments, tokens)
            loss.block_until_ready()
        if number >= WARM:
            runs.append((clock() - start) / cores / CALLS)
    return statistics.median(runs)
