"""The slowdown of operators in whole training steps, compared with single ones, with every device at a step of its own.

In a program an operator finds its arrays in farther caches, is one of hundreds that a thread pool starts, and is
compiled with layouts chosen for others. No sweep of single operators shows that.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.api import parallelize
from autopar.jax_compat import Device
from autopar.lowering import build, device_mesh
from autopar.rewrite import TracedStep
from autopar.tools.chains import LONG_SECONDS, clock_of
from autopar.tools.device_sweep import Sample, single_plan
from passes.cluster import Cluster, DeviceSpec, Mesh, what_if

KIND = "training steps"
LAYERS = 2
"""Blocks of a step: an operator of the second one finds its arrays where a program leaves them."""
VOCABULARY = 256
CLASSES = 16
RATE = 1e-3
"""The learning rate: small, so that numbers stay as large as they are."""

WARM, RUNS, CALLS = 2, 9, 8
"""Runs of each training before any is timed; those of which the median counts, the trainings in turn; and calls of each
at most, as many as take 0.1 s. On 8 devices of 2 cores, medians of such runs are within 10 % of each other; of runs of
one training after the other, those of steps of 3 to 7 ms were up to 31 % apart."""

BUSY = 1.25
"""Wall clock over processor time from which on a machine runs other programs too, which say nothing of a step: the
quietest of nine runs took 1.00 to 1.07 times as long alone (8 devices on 2 cores), and 1.28 to 1.59 times beside four
busy processes."""

STARTS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""How many times as long as the least kernel an operator may take to start in a step: it finds neither its code nor its
arrays in a cache, and a compiler makes two or three kernels of some. Each is at most half as much again as the one
before: what is fitted differs by as much from one measurement to the next (12 to 20 us in four)."""


Call = Callable[[], None]
"""A function that takes a step, and returns when it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep(ABC):
    """A training by SGD with momentum, on one device."""

    batch: int = 1

    @property
    @abstractmethod
    def size(self) -> str:
        """The size of the training in words."""

    @abstractmethod
    def arguments(self) -> tuple[dict[str, Any], dict[str, Any], jax.ShapeDtypeStruct]:
        """The types of weights, moments and the batch, of integers."""

    @abstractmethod
    def loss(self, weights: dict[str, Any], batch: jax.Array) -> jax.Array:
        """The loss of a batch, which a step lowers."""

    def step(self, weights: dict[str, Any], moments: dict[str, Any], batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        """The next weights and moments, and the loss."""
        loss, gradients = jax.value_and_grad(self.loss)(weights, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda w, m: w - RATE * m, weights, moments), moments, loss

    def traced(self) -> TracedStep:
        """The step as planners take it."""
        return parallelize(self.step).step(*self.arguments())

    def drawn(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
        """Random weights, moments and a batch."""
        rng = np.random.default_rng(0)

        def draw(struct: jax.ShapeDtypeStruct) -> jax.Array:
            if np.issubdtype(struct.dtype, np.integer):
                return jnp.asarray(rng.integers(0, VOCABULARY, struct.shape), struct.dtype)
            return jnp.asarray(rng.normal(scale=0.02, size=struct.shape), struct.dtype)

        return cast(
            "tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]", jax.tree.map(draw, self.arguments())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(WholeStep):
    """The training of `LAYERS` transformer blocks."""

    hidden: int
    sequence: int
    head: int = 16
    dtype: str = "float32"

    @property
    def size(self) -> str:
        return f"{LAYERS} blocks of {self.hidden}, {self.batch} x {self.sequence} tokens"

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any], jax.ShapeDtypeStruct]:
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, h), "logits": (h, VOCABULARY)}
        for layer in range(LAYERS):
            of_block = {"qkv": (h, 3 * h), "out": (h, h), "up": (h, 4 * h), "down": (4 * h, h), "scale": (h,)}
            shapes |= {f"{name}_{layer}": shape for name, shape in of_block.items()}
        weights = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}
        return weights, weights, jax.ShapeDtypeStruct((self.batch, self.sequence), "int32")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionalNet(WholeStep):
    """The training of residual blocks on images: two convolutions of 3 x 3 each, one of 1 x 1 past them, and norms."""

    image: int
    channels: tuple[int, ...]

    @property
    def size(self) -> str:
        widths = ", ".join(map(str, self.channels))
        return f"blocks of {widths} channels, {self.batch} of {self.image} x {self.image}"

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any], jax.ShapeDtypeStruct]:
        shapes: dict[str, tuple[int, ...]] = {"logits": (self.channels[-1], CLASSES)}
        for layer, (into, out) in enumerate(zip((3, *self.channels), self.channels, strict=False)):
            shapes |= {f"first_{layer}": (3, 3, into, out), f"second_{layer}": (3, 3, out, out)}
            shapes |= {f"past_{layer}": (1, 1, into, out), f"scale_{layer}": (out,), f"shift_{layer}": (out,)}
        weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        return weights, weights, jax.ShapeDtypeStruct((self.batch, self.image, self.image, 3), "int32")

    def loss(self, weights: dict[str, Any], batch: jax.Array) -> jax.Array:
        """The mean cross entropy of each image's first number."""
        x = batch / VOCABULARY
        for layer in range(len(self.channels)):
            names = ("first", "second", "past", "scale", "shift")
            first, second, past, scale, shift = (weights[f"{name}_{layer}"] for name in names)
            stride = 2 if layer else 1
            y = jax.nn.relu(_of_channels(_convolved(x, first, stride)) * scale + shift)
            x = jax.nn.relu(_of_channels(_convolved(y, second, 1)) + _convolved(x, past, stride))
        logits = jax.nn.log_softmax(x.mean((1, 2)) @ weights["logits"])
        return -jnp.mean(jnp.take_along_axis(logits, batch[:, 0, 0, :1] % CLASSES, axis=-1))


def _convolved(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)


def _of_channels(x: jax.Array) -> jax.Array:
    """Batch normalisation: every channel with mean 0 and variance 1 over images and places, from sums that do not wait
    for each other, as Flax's layer has them.
    """
    mean, squares = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(jnp.maximum(squares - mean * mean, 0.0) + 1e-5)


def transformers(platform: str) -> tuple[Transformer, ...]:
    """The trainings that are measured: on a CPU small ones, as its devices are threads of a few cores."""
    if platform == "cpu":
        return tuple(Transformer(hidden=h, sequence=s, batch=2) for h, s in ((64, 64), (128, 128), (256, 128)))
    of_hidden = (1024, 2048)
    return tuple(Transformer(hidden=h, sequence=1024, batch=4, head=64, dtype="bfloat16") for h in of_hidden)


def convolutional_nets(platform: str) -> tuple[ConvolutionalNet, ...]:
    """The trainings on images that are measured: none where convolutions are kernels like any other."""
    if platform != "cpu":
        return ()
    return tuple(ConvolutionalNet(image=8, channels=c, batch=8) for c in ((8, 16, 32), (16, 32, 64)))


def slowed(cluster: Cluster, mesh: Mesh, devices: Sequence[Device]) -> tuple[Cluster, tuple[Sample, ...]]:
    """The cluster whose operators take as many times as long as whole trainings do, and its prediction for each
    training.

    It is one factor for all, the median: trainings do not show which operator is slower, and one of five was seen to
    take 1.7 times as long as a minute before. Where there are steps of a few large operators and of many small ones,
    they also say how long an operator takes to start: as long as makes the trainings' factors most alike.
    """
    platform = devices[0].platform
    several = (*transformers(platform), *convolutional_nets(platform))
    spent = seconds(several, mesh, devices)
    steps = [training.traced() for training in several]
    device, fits = cluster.group().device, list[tuple[float, DeviceSpec]]()
    for times in STARTS if convolutional_nets(platform) else STARTS[:1]:
        started = replace(device, launch_seconds=device.launch_seconds * times)
        factors = [
            s / single_plan(step, _on(cluster, started)).step_seconds for s, step in zip(spent, steps, strict=True)
        ]
        factor = statistics.median(factors)
        error = statistics.fmean(math.log(each / factor) ** 2 for each in factors)
        fits.append((error, what_if.slower_device(started, factor)))
    result = _on(cluster, min(fits, key=operator.itemgetter(0))[1])
    samples = (
        Sample(kind=KIND, size=each.size, predicted=single_plan(step, result).step_seconds, measured=measured)
        for each, step, measured in zip(several, steps, spent, strict=True)
    )
    return result, tuple(samples)


def _on(cluster: Cluster, device: DeviceSpec) -> Cluster:
    """The cluster of such devices."""
    return replace(cluster, groups=(replace(cluster.group(), device=device),))


def seconds(several: Sequence[WholeStep], mesh: Mesh, devices: Sequence[Device]) -> list[float]:
    """Median seconds of each training's step, in autopar's program of it, while every device of a mesh takes one.

    Where they are a processor's, they are as many times as long as the quietest run took by the wall clock, since the
    cores of devices that share them are never all at work.
    """
    clock, cores = clock_of(devices)
    calls = [alone(training, mesh, devices) for training in several]
    runs: list[list[float]] = [[] for _ in several]
    by_wall: list[list[float]] = [[] for _ in several]
    for _ in range(WARM + RUNS):
        for call, each, waited in zip(calls, runs, by_wall, strict=True):
            began, start, count, spent = time.perf_counter(), clock(), 0, 0.0
            while count < CALLS and spent < LONG_SECONDS * cores:
                call()
                count, spent = count + 1, clock() - start
            each.append(spent / cores / count)
            waited.append((time.perf_counter() - began) * cores / max(spent, 1e-9))
    idle = (min(waited[WARM:]) for waited in by_wall)
    return [
        statistics.median(each[WARM:]) * (ratio if ratio < BUSY else 1.0)
        for each, ratio in zip(runs, idle, strict=True)
    ]


def alone(training: WholeStep, mesh: Mesh, devices: Sequence[Device]) -> Call:
    """A function in which every device of a mesh takes a step of its own, and which waits for all of them."""
    real = device_mesh(mesh, devices) if mesh.axes else jax.sharding.Mesh(np.array(devices), ("d",))
    spec, step = PartitionSpec(real.axis_names), training.traced()
    program = build(step.traced, single_plan(step, mesh.cluster), devices[:1]).function

    def local(state: tuple[jax.Array, ...], batch: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        *changed, loss = (x[None] for x in program(*(x[0] for x in (*state, batch))))
        return tuple(changed), loss

    run = jax.jit(
        jax.shard_map(local, mesh=real, in_specs=(spec, spec), out_specs=spec, check_vma=False), donate_argnums=0
    )
    *given, batch = (
        jax.device_put(np.stack([x] * len(devices)), NamedSharding(real, spec))
        for x in jax.tree.leaves(training.drawn())
    )
    state = [tuple(given)]

    def call() -> None:
        state[0], loss = run(state[0], batch)
        loss.block_until_ready()

    return call
