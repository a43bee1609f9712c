"""Times of transfers between submeshes, autopar's and `jax.device_put`'s: `python -m benchmarks.transfer --help`.

For each pair of shardings of virtual CPU devices and each size: how long a call keeps the host (median), and how long
it takes until the result is there (median). Bounds on the host: 120 us from one device to one, 330 us from 4 to 2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

from autopar.runtime.transfer import compile_transfer
from autopar.runtime.transfer_plan import plan_transfer
from benchmarks.console import stdout
from passes.text import quantities

DEVICES = 8
SIZES = {"4 KB": 32, "1 MB": 512, "16 MB": 2048}
"""The side of each square float32 array."""

BOUNDS = {"1 -> 1": 120e-6, "4 -> 2": 330e-6}
"""Seconds of the host at the smallest size, for some pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Median seconds of one call: until it returns, and until its result is there."""

    host: float
    total: float


def pairs() -> dict[str, tuple[Sharding, Sharding]]:
    """The source and target of each row."""

    def rows(first: int, count: int) -> NamedSharding:
        return NamedSharding(Mesh(np.array(jax.devices()[first : first + count]), ("x",)), P("x"))

    def columns(first: int, count: int) -> NamedSharding:
        return NamedSharding(rows(first, count).mesh, P(None, "x"))

    first, second = (SingleDeviceSharding(device) for device in jax.devices()[:2])
    return {
        "1 -> 1": (first, second),
        "4 -> 4, same layout": (rows(0, 4), rows(4, 4)),
        "4 in place, other layout": (rows(0, 4), columns(0, 4)),
        "4 -> 2": (rows(0, 4), rows(4, 2)),
        "2 -> 2, other layout": (rows(0, 2), columns(4, 2)),
    }


def measure(moves: dict[str, Callable[[], jax.Array]], repeats: int) -> dict[str, Times]:
    """The median times of each, which run in turn, so that what else the machine does falls on all alike."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in moves}
    for i in range(-5, repeats):
        for name, move in moves.items():
            start = time.perf_counter()
            moved = move()
            returned = time.perf_counter()
            jax.block_until_ready(moved)
            if i >= 0:
                spent[name].append((returned - start, time.perf_counter() - start))
    return {
        name: Times(host=statistics.median(t[0] for t in times), total=statistics.median(t[1] for t in times))
        for name, times in spent.items()
    }


def row(source: Sharding, target: Sharding, side: int, repeats: int) -> tuple[str, dict[str, Times]]:
    """The kind of autopar's transfer of a square array, and the times of it and of `jax.device_put`, by name."""
    values = np.arange(side * side, dtype=np.float32).reshape(side, side)
    array = jax.block_until_ready(jax.device_put(values, source))
    transfer = compile_transfer(plan_transfer(values.shape, values.dtype, source, target))
    moves = {"autopar": lambda: transfer(array), "device_put": lambda: jax.device_put(array, target)}
    return transfer.plan.kind, measure(moves, repeats)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description="Time transfers between submeshes beside jax.device_put.",
    )
    parser.add_argument("--repeats", type=int, default=100, metavar="N", help="calls of each (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Prints the table; exits with 1 where a bound is missed."""
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    table = Table("devices", "array", "kind", title=f"transfers on {DEVICES} virtual CPU devices, medians")
    for heading in ("host", "host, device_put", "total", "total, device_put"):
        table.add_column(heading, justify="right")
    missed: list[str] = []
    for pair, (source, target) in pairs().items():
        for size, side in SIZES.items():
            kind, seconds = row(source, target, side, args.repeats)
            ours, plain = seconds["autopar"], seconds["device_put"]
            shown = map(quantities.seconds, (ours.host, plain.host, ours.total, plain.total))
            table.add_row(pair, size, kind, *shown)
            bound = BOUNDS.get(pair)
            if bound is not None and size == next(iter(SIZES)) and ours.host > bound:
                missed.append(f"{pair}: {quantities.seconds(ours.host)} of the host, bound {quantities.seconds(bound)}")
    console = stdout()
    console.print(table)
    for miss in missed:
        console.print(f"MISSED {miss}", style="red", soft_wrap=True)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
