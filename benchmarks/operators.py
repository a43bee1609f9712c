"""Seconds of layers with their gradients on virtual CPU devices, predicted and measured: `benchmarks.operators --help`.

Predictions are those of the cost model for the cluster as it was measured here. Every device computes each layer at
once, on arrays of its own and without collectives. A second prediction says how long they would take if rearranging
arrays in memory cost nothing.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

import autopar
from autopar.tools import chains, device_sweep
from autopar.tools.device_sweep import Case
from benchmarks.console import stdout
from passes.cluster import Cluster, Mesh
from passes.text import quantities

DEVICES = 8
HEADS = 8
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of a layer: predicted, predicted if arrays were rearranged at no cost, and the least measured."""

    layer: str
    shape: tuple[int, ...]
    predicted: float
    free: float
    measured: float


def trained(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A layer with the gradients of its array and weights, in the shape of its array."""

    def step(x: jax.Array, *weights: jax.Array) -> jax.Array:
        def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
            return jnp.sum(layer(x, *weights) ** 2)

        first, *others = jax.grad(loss, tuple(range(1 + len(weights))))(x, *weights)
        return x - 1e-3 * (first + sum(jnp.sum(other) for other in others))

    return step


def attention(x: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array) -> jax.Array:
    """Multi-head attention of an array [batch, positions, features]."""

    def heads(weight: jax.Array) -> jax.Array:
        return (x @ weight).reshape(*x.shape[:2], HEADS, -1)

    scores = jnp.einsum("bqhd,bkhd->bhqk", heads(query), heads(key)) * 0.1
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads(value))
    return mixed.reshape(*x.shape[:2], -1) @ out


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two products with an activation between them."""
    return jax.nn.relu(x @ up) @ down


def normed_mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The same behind a norm, beside a skip connection."""
    spread = x - jnp.mean(x, -1, keepdims=True)
    normed = spread * jax.lax.rsqrt(jnp.mean(spread**2, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(normed @ up) @ down


def experts(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The same for each expert of an array [experts, groups, positions, features]."""
    hidden = jax.nn.gelu(jnp.einsum("egsh,ehw->egsw", x, up))
    return jnp.einsum("egsw,ewh->egsh", hidden, down)


def head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The logarithms of probabilities of classes."""
    return jax.nn.log_softmax(x @ weight)


def cases() -> Iterator[Case]:
    """The layers, in sizes that a device has of the zoo's models, and two products that differ in their order."""
    feed = ((128, 512), (512, 128))
    listed: tuple[tuple[str, Callable[..., jax.Array], tuple[int, ...], tuple[tuple[int, ...], ...]], ...] = (
        ("attention", attention, (1, 128, 128), ((128, 128),) * 4),
        ("attention", attention, (2, 128, 64), ((64, 128), (64, 128), (64, 128), (128, 64))),
        ("mlp", mlp, (1, 128, 128), feed),
        ("norm and mlp", normed_mlp, (1, 128, 128), feed),
        ("experts", experts, (8, 1, 32, 128), ((8, 128, 512), (8, 512, 128))),
        ("head and loss", head, (1, 128, 128), ((128, 256),)),
    )
    for name, layer, shape, weights in listed:
        yield Case(kind=name, size="", applied=trained(layer), shape=shape, weights=weights, times=16)
    for name, product in (("sums last", "bmk,bkn->bmn"), ("sums first", "bkm,bkn->bmn")):
        multiplied = partial(jnp.einsum, product)
        yield Case(kind=name, size="", applied=multiplied, shape=(4, 256, 256), weights=((4, 256, 256),), times=16)
        yield Case(kind=name, size="", applied=multiplied, shape=(2048, 8, 8), weights=((2048, 8, 8),), times=4)


def row_of(case: Case, cluster: Cluster, mesh: Mesh) -> Row:
    """A layer, predicted on a cluster as it is and where order in memory is free, and measured."""
    group = cluster.group()
    device = replace(group.device, strided_bytes_per_second=0.0, product_seconds=0.0, pixel_seconds=0.0)
    free = replace(cluster, groups=(replace(group, device=device),))
    timer = device_sweep.timer_of(mesh, tuple(jax.devices()))
    return Row(
        layer=case.kind,
        shape=case.shape,
        predicted=device_sweep.predicted_seconds(case.step(), cluster),
        free=device_sweep.predicted_seconds(case.step(), free),
        measured=min(timer(case) for _ in range(ROUNDS)),
    )


def table(rows: list[Row]) -> Table:
    """The rows as a table, with the geometric mean of the ratios."""
    columns = (
        "layer with its gradients, or product",
        "array",
        "predicted",
        "if rearranging is free",
        "measured",
        "measured / predicted",
        "measured / free",
    )
    printed = Table(title=f"{DEVICES} devices at once, {chains.REPEATS * ROUNDS} runs, the fastest")
    for number, name in enumerate(columns):
        printed.add_column(name, justify="right" if number > 1 else "left")
    for row in rows:
        seconds = map(quantities.seconds, (row.predicted, row.free, row.measured))
        ratios = (f"{row.measured / each:.2f}" for each in (row.predicted, row.free))
        printed.add_row(row.layer, " x ".join(map(str, row.shape)), *seconds, *ratios)
    ratios = ([row.measured / row.predicted for row in rows], [row.measured / row.free for row in rows])
    printed.add_row("geometric mean", "", "", "", "", *(f"{statistics.geometric_mean(each):.2f}" for each in ratios))
    return printed


def main(argv: list[str] | None = None) -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operators",
        description="Measure layers of models with their gradients on 8 virtual CPU devices, beside predictions.",
        epilog="example: python -m benchmarks.operators --cluster here.json",
    )
    saved = f"what `autopar measure --devices {DEVICES} --out FILE` saved (default: measure now)"
    parser.add_argument("--cluster", type=Path, metavar="FILE", help=saved)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    cluster: Any = (
        autopar.Cluster.from_json(json.loads(args.cluster.read_text())) if args.cluster else autopar.measure()
    )
    mesh = Mesh(axes=("d",), sizes=(DEVICES,), cluster=cluster)
    rows = [row_of(case, cluster, mesh) for case in cases()]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        stdout().print(table(rows))


if __name__ == "__main__":
    main()
