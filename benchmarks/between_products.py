"""Collectives on virtual CPU devices alone and between products: `python -m benchmarks.between_products --help`.

A program computes between its collectives. Where devices share cores, some are still computing when the first of them
reaches a collective, and threads have to be woken after it. `autopar measure` measures as in the last column of the
first table, and has short collectives take as much longer as data-parallel training steps say: the second table.
"""

import argparse
from collections.abc import Iterator

import jax
from jax import lax
from rich.table import Table

from autopar.tools import chains, parallel_steps, whole_steps
from benchmarks.console import stdout
from passes.cluster import Mesh, local_cluster
from passes.text import quantities

DEVICES = 8
NBYTES = (1 << 12, 1 << 14, 1 << 17, 1 << 20)

OPERATIONS: dict[str, chains.Operation] = {
    "all_reduce": lambda x: lax.psum(x, "r") * (1 / DEVICES),
    "all_gather": lambda x: lax.all_gather(x[: x.size // DEVICES], "r", tiled=True) * 0.9,
    "all_to_all": lambda x: lax.all_to_all(x, "r", 0, 0, tiled=True) * 0.9,
}


def scaled(x: jax.Array) -> jax.Array:
    """The computation beside a collective in a chain: the array, scaled."""
    return x * 0.9


def rows() -> Iterator[tuple[str, int, float, float]]:
    """(kind, bytes of an array, seconds by itself, seconds between products) of each collective."""
    devices = jax.devices()[:DEVICES]
    mesh = Mesh(axes=("r",), sizes=(DEVICES,), cluster=local_cluster(devices))
    for nbytes in NBYTES:
        n = nbytes // 4
        around = chains.apart_seconds(scaled, (n,), mesh, devices)
        between = {kind: chains.between_products(operation, n, mesh, devices) for kind, operation in OPERATIONS.items()}
        product = chains.between_products(scaled, n, mesh, devices)
        for _ in range(chains.ROUNDS):
            for chain in (product, *between.values()):
                chain.go_on()
        for kind, operation in OPERATIONS.items():
            alone = chains.apart_seconds(operation, (n,), mesh, devices) - around
            yield kind, nbytes, alone, between[kind].seconds - product.seconds


def step_rows() -> Iterator[tuple[str, int, parallel_steps.Pair, parallel_steps.Pair]]:
    """(size, collectives, (seconds of every device by itself, of all in a data-parallel step), both measured again) of
    each training step.
    """
    devices = jax.devices()[:DEVICES]
    mesh = Mesh(axes=("r",), sizes=(DEVICES,), cluster=local_cluster(devices))
    for training in whole_steps.convolutional_nets("cpu"):
        count = sum(collective.count for collective in parallel_steps.planned(training, mesh.cluster).collectives)
        first, again = (parallel_steps.seconds(training, mesh, devices) for _ in range(2))
        yield training.size, count, first, again


def main(argv: list[str] | None = None) -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.between_products", description=__doc__)
    parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    runs = f"fastest of {chains.REPEATS} runs by itself, in {chains.ROUNDS} rounds between products"
    table = Table(title=f"a collective among {DEVICES} devices, {runs}", title_justify="left")
    for name in ("kind", "an array", "by itself", "between products"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind, nbytes, alone, between in rows():
        table.add_row(kind, quantities.nbytes(nbytes), *map(quantities.seconds, (alone, between)))
    stdout().print(table)
    steps = Table(title=f"training steps on {DEVICES} devices, medians of {parallel_steps.PAIRS}", title_justify="left")
    names = (
        "step",
        "collectives",
        "each device alone",
        "data parallel",
        "the same again",
        "more a collective",
        "again",
    )
    for name in names:
        steps.add_column(name, justify="left" if name == "step" else "right")
    for size, count, first, again in step_rows():
        more = ((joined - apart) / count for apart, joined in (first, again))
        steps.add_row(size, str(count), *map(quantities.seconds, (*first, again[1], *more)))
    stdout().print(steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
