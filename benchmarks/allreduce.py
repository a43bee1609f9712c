"""Steps, bytes and seconds of textbook all-reduces, written out in permutes: `python -m benchmarks.allreduce --help`.

Each algorithm is a `shard_map` program over virtual CPU devices. What its compiled HLO sends is compared with the costs
that are printed for it (allreduce_costs.csv), its sum against `psum`, its time beside that of `psum`. With N workers
that hold M numbers each:

                       total traffic       steps
    parameter server   2 N M               2 N              the server is a device of its own
    naive              N (N-1) M           N - 1            everybody sends everything to everybody
    ring               2 (N-1) M           2 (N-1)          pieces of M / N
    tree               2 (N-1) M           2 log2 N         binomial, up and down
    butterfly          N M log2 N          log2 N           recursive doubling
    halving            2 (N-1) M           2 log2 N         recursive halving, then doubling (Rabenseifner)

The printed `2 N M` of ring and tree leaves out that a worker does not send to itself.

Reference: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.console import stdout
from passes.text import quantities

COSTS = Path(__file__).resolve().parent / "allreduce_costs.csv"
DEVICES = 8
AXIS = "x"


class Program(Protocol):
    """The sum over all `devices` of the numbers that each holds."""

    def __call__(self, x: jax.Array, devices: int) -> jax.Array: ...


def parameter_server(x: jax.Array, devices: int) -> jax.Array:
    """The last device adds up what the others send it one by one, and sends each the sum; its own numbers are none."""
    server, rank = devices - 1, lax.axis_index(AXIS)
    total = jnp.zeros_like(x)
    for worker in range(server):
        total += lax.ppermute(x, AXIS, [(worker, server)])
    result = total
    for worker in range(server):
        result = jnp.where(rank == worker, lax.ppermute(total, AXIS, [(server, worker)]), result)
    return result


def naive(x: jax.Array, devices: int) -> jax.Array:
    """Everybody sends everything to everybody and adds by itself."""
    total = x
    for distance in range(1, devices):
        total += lax.ppermute(x, AXIS, _shift(devices, distance))
    return total


def ring(x: jax.Array, devices: int) -> jax.Array:
    """Pieces go round and are added to, then go round again as they are."""
    rank = lax.axis_index(AXIS)
    pieces = x.reshape(devices, -1)
    piece = pieces[rank]
    for step in range(1, devices):  # what arrives has been with `step` others
        piece = pieces[(rank - step) % devices] + lax.ppermute(piece, AXIS, _shift(devices, 1))
    result = jnp.zeros_like(pieces).at[(rank + 1) % devices].set(piece)
    for step in range(1, devices):
        piece = lax.ppermute(piece, AXIS, _shift(devices, 1))
        result = result.at[(rank + 1 - step) % devices].set(piece)
    return result.reshape(x.shape)


def tree(x: jax.Array, devices: int) -> jax.Array:
    """Sums go up a binomial tree to the first device, and the result down again."""
    rank, total = lax.axis_index(AXIS), x
    strides = [2**level for level in range(_levels(devices))]
    for stride in strides:
        up = [(child, child - stride) for child in range(stride, devices, 2 * stride)]
        total += lax.ppermute(total, AXIS, up)  # who receives nothing gets zeros
    for stride in reversed(strides):
        down = [(child - stride, child) for child in range(stride, devices, 2 * stride)]
        total = jnp.where(rank % (2 * stride) == stride, lax.ppermute(total, AXIS, down), total)
    return total


def butterfly(x: jax.Array, devices: int) -> jax.Array:
    """Pairs at a distance of 1, 2, 4, ... exchange all that they have."""
    total = x
    for level in range(_levels(devices)):
        total += lax.ppermute(total, AXIS, _pairs(devices, 2**level))
    return total


def halving(x: jax.Array, devices: int) -> jax.Array:
    """Pairs exchange halves and add, halves of halves after that; then sums, in reverse."""
    rank, block = lax.axis_index(AXIS), x
    strides = [2**level for level in reversed(range(_levels(devices)))]
    for stride in strides:
        low, high = jnp.split(block, 2)
        is_high = (rank // stride) % 2 == 1
        kept, given = jnp.where(is_high, high, low), jnp.where(is_high, low, high)
        block = kept + lax.ppermute(given, AXIS, _pairs(devices, stride))
    for stride in reversed(strides):
        other = lax.ppermute(block, AXIS, _pairs(devices, stride))
        is_high = (rank // stride) % 2 == 1
        block = jnp.where(is_high, jnp.concatenate([other, block]), jnp.concatenate([block, other]))
    return block


def _shift(devices: int, distance: int) -> list[tuple[int, int]]:
    return [(rank, (rank + distance) % devices) for rank in range(devices)]


def _pairs(devices: int, distance: int) -> list[tuple[int, int]]:
    return [(rank, rank ^ distance) for rank in range(devices)]


def _levels(devices: int) -> int:
    """The doublings from 1 to `devices`. Raises ValueError where they are no power of two."""
    if devices < 1 or devices & (devices - 1):
        raise ValueError(f"{devices} devices: trees and butterflies take a power of two")
    return devices.bit_length() - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A program, its name in the file, and what it sends in all and in how many steps, by (workers, numbers)."""

    program: Program
    printed: str
    traffic: Callable[[int, int], int]
    steps: Callable[[int], int]
    spares: int = 0
    """Devices that are no workers."""


ALGORITHMS: Mapping[str, Algorithm] = {
    "parameter server": Algorithm(
        program=parameter_server,
        printed="parameter server",
        traffic=lambda n, m: 2 * n * m,
        steps=lambda n: 2 * n,
        spares=1,
    ),
    "naive": Algorithm(
        program=naive, printed="naive all-to-all", traffic=lambda n, m: n * (n - 1) * m, steps=lambda n: n - 1
    ),
    "ring": Algorithm(program=ring, printed="ring", traffic=lambda n, m: 2 * (n - 1) * m, steps=lambda n: 2 * (n - 1)),
    "tree": Algorithm(
        program=tree, printed="tree", traffic=lambda n, m: 2 * (n - 1) * m, steps=lambda n: 2 * _levels(n)
    ),
    "butterfly": Algorithm(
        program=butterfly,
        printed="butterfly (recursive doubling)",
        traffic=lambda n, m: n * m * _levels(n),
        steps=_levels,
    ),
    "halving": Algorithm(
        program=halving,
        printed="recursive halving + doubling (Rabenseifner)",
        traffic=lambda n, m: 2 * (n - 1) * m,
        steps=lambda n: 2 * _levels(n),
    ),
}


PRINTED: Mapping[str, Callable[[int, int], float]] = {
    "2 N M": lambda n, m: 2 * n * m,
    "N (N-1) M (table: N^2 M)": lambda n, m: n * (n - 1) * m,
    "N M log2 N": lambda n, m: n * m * math.log2(n),
    "2 M (N-1)/N": lambda n, m: 2 * m * (n - 1),
}
"""The file's formulas of traffic, of a worker where the file has no total, as numbers sent by all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The traffic of a compiled program: bytes in all, by the busiest device, and in how many steps."""

    nbytes: int
    busiest_nbytes: int
    steps: int


_PERMUTE = re.compile(
    r"= \(?f32\[(\d*)\].* collective-permute(?:-start)?\(.*source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}"
)
_MENTION = re.compile(r" collective-permute(?:-start)?\(")


def sent(hlo_text: str) -> Sent:
    """The traffic of a compiled program's permutes. Raises ValueError for one that cannot be read."""
    by_device: Counter[int] = Counter()
    steps = 0
    for line in hlo_text.split("\n"):
        if not _MENTION.search(line):
            continue
        permute = _PERMUTE.search(line)
        if permute is None:
            raise ValueError(f"a permute that cannot be read: {line.strip()}")
        nbytes = 4 * int(permute[1] or 1)
        sources = [int(pair.split(",")[0]) for pair in re.findall(r"\{(\d+,\d+)\}", permute[2])]
        by_device.update(dict.fromkeys(sources, nbytes))
        steps += 1
    return Sent(nbytes=by_device.total(), busiest_nbytes=max(by_device.values(), default=0), steps=steps)


def printed_nbytes(name: str, numbers: int, workers: int) -> float:
    """Bytes that the file says an algorithm sends in all, for float32."""
    with COSTS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["collective"] == "all-reduce"]
    row = next(row for row in rows if row["algorithm"] == ALGORITHMS[name].printed)
    formula = row["total_traffic_in_parameters"] or row["per_worker_sent_in_parameters"]
    return 4 * PRINTED[formula](workers, numbers)


def over(devices: int, program: Callable[[jax.Array], jax.Array]) -> Any:
    """The program jitted over the first so many devices, each of which holds a row of [devices, numbers]."""
    spec = P(AXIS, None)
    rows = jax.shard_map(
        lambda x: program(x[0])[None], mesh=_mesh(devices), in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(rows)


def placed(values: NDArray[np.float32]) -> jax.Array:
    """The rows of an array, each on a device."""
    return jax.device_put(values, NamedSharding(_mesh(len(values)), P(AXIS, None)))


def _mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), (AXIS,), devices=jax.devices()[:devices])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One algorithm: bytes in all as compiled, as derived and as printed; steps; seconds, and those of `psum`."""

    algorithm: str
    workers: int
    nbytes: int
    derived_nbytes: int
    printed_nbytes: float
    busiest_nbytes: int
    steps: int
    derived_steps: int
    difference: float
    seconds: float
    psum_seconds: float


def measure(name: str, devices: int, numbers: int, rounds: int) -> Row:
    """The algorithm over so many devices, each of which holds so many numbers."""
    algorithm = ALGORITHMS[name]
    workers = devices - algorithm.spares
    values = np.random.default_rng(0).normal(size=(devices, numbers)).astype(np.float32)
    values[workers:] = 0
    program = over(devices, partial(algorithm.program, devices=devices))
    psum = over(devices, lambda x: lax.psum(x, AXIS))
    x = placed(values)
    compiled, reference = program.lower(x).compile(), psum.lower(x).compile()
    traffic = sent(compiled.as_text())
    difference = float(np.max(np.abs(np.asarray(compiled(x)) - np.asarray(reference(x)))))
    ours, theirs = in_turn(lambda: compiled(x), lambda: reference(x), rounds)
    return Row(
        algorithm=name,
        workers=workers,
        nbytes=traffic.nbytes,
        derived_nbytes=4 * algorithm.traffic(workers, numbers),
        printed_nbytes=printed_nbytes(name, numbers, workers),
        busiest_nbytes=traffic.busiest_nbytes,
        steps=traffic.steps,
        derived_steps=algorithm.steps(workers),
        difference=difference,
        seconds=ours,
        psum_seconds=theirs,
    )


def in_turn(first: Callable[[], jax.Array], second: Callable[[], jax.Array], rounds: int) -> tuple[float, float]:
    """Median seconds of two programs, run by turns."""
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for program, seconds in zip((first, second), spent, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program())
            seconds.append(time.perf_counter() - start)
    ours, theirs = map(statistics.median, spent)
    return ours, theirs


def table(rows: Sequence[Row]) -> Table:
    """An algorithm a row."""
    shown = Table(title="all-reduce, written out in permutes", title_justify="left", padding=(0, 0))
    shown.add_column("algorithm", no_wrap=True)
    for name in ("workers", "steps", "bytes sent", "in literature", "busiest device", "time", "psum's time"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        nbytes = (quantities.nbytes(size) for size in (row.nbytes, row.printed_nbytes, row.busiest_nbytes))
        times = (quantities.seconds(spent) for spent in (row.seconds, row.psum_seconds))
        shown.add_row(row.algorithm, str(row.workers), str(row.steps), *nbytes, *times)
    return shown


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.allreduce",
        description=f"Run all-reduce as {', '.join(ALGORITHMS)} over virtual CPU devices, each as a shard_map program "
        "of permutes: steps and bytes in all as compiled, bytes as printed, those of the busiest device, the time "
        "beside psum. Exits with 1 where what is compiled is not what was derived.",
        epilog="example: python -m benchmarks.allreduce --devices 16 --numbers 1048576",
    )
    names = tuple(ALGORITHMS)
    parser.add_argument("--algorithm", choices=names, action="append", metavar="NAME", help="again for more")
    parser.add_argument("--devices", type=int, default=DEVICES, metavar="N", help="a power of two (default: 8)")
    parser.add_argument("--numbers", type=int, default=2**16, metavar="M", help="a device holds (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="times measured (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args(argv)
    if args.devices < 2 or args.devices & (args.devices - 1) or args.numbers % args.devices:
        parser.error("--devices is a power of two from 2, and divides --numbers")
    return args


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 where a program sends something else than was derived, else 0."""
    args = arguments(argv)
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")
    console = stdout()
    rows: list[Row] = []
    for name in args.algorithm or ALGORITHMS:
        with console.status(f"{name}: compiling, running"):
            rows.append(measure(name, args.devices, args.numbers, args.rounds))
    missed = [row for row in rows if (row.nbytes, row.steps) != (row.derived_nbytes, row.derived_steps)]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return bool(missed)
    console.print(table(rows))
    console.print(
        f"largest difference from psum: {max(row.difference for row in rows):.1e}; the server of the parameter server "
        "is a device beside its workers; ring and tree send (N-1)/N of the printed 2 N M"
    )
    for row in missed:
        console.print(
            f"MISSED {row.algorithm}: {row.nbytes} bytes in {row.steps} steps, derived "
            f"{row.derived_nbytes} in {row.derived_steps}"
        )
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
