"""Seconds of collectives, by the cost model and as measured: `python -m benchmarks.collectives --help`.

Without options: the measurements that papers and public repositories print (collectives_measured.csv). With `--local`:
this machine's virtual CPU devices, measured here. With `--fit`: the links that would fit best, which is where the
numbers of passes/cluster/devices.py come from.
"""

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

from benchmarks.console import stdout
from benchmarks.published.machines import AWS_P5_LINK
from passes.cluster import Kind, local_cluster
from passes.cluster.cluster import Link
from passes.cluster.collectives import seconds
from passes.cluster.devices import host_spec
from passes.cluster.mesh import Group
from passes.text import quantities

PUBLISHED = Path(__file__).resolve().parent / "published" / "data" / "collectives_measured.csv"

KINDS: dict[str, Kind] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}

NBYTES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24))
DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured collective; `nbytes` is the larger side of one device's buffer."""

    kind: Kind
    ranks: int
    hosts: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Machines that were measured, and the links they are predicted with.

    `call_seconds` is what the measuring program adds to each call: launching the kernel, and its own overhead.
    `fitted` names the numbers that `--fit` adjusts.
    """

    name: str
    intra: Link
    inter: Link
    call_seconds: float
    measurements: tuple[Measurement, ...]
    fitted: tuple[str, ...] = field(default=())

    def predict(self, m: Measurement) -> float:
        """Seconds of the collective under the cost model, with the call."""
        group = Group.of(m.ranks, m.hosts, self.intra, self.inter)
        return self.call_seconds + seconds(m.kind, m.nbytes, group)

    def errors(self) -> list[float]:
        """Relative error of each prediction: by how much the larger of the two exceeds the smaller."""
        return [math.exp(abs(math.log(self.predict(m) / m.seconds))) - 1 for m in self.measurements]


def published(path: Path = PUBLISHED) -> tuple[System, ...]:
    """The systems of the file whose devices the table knows or nearly knows, with their measurements."""
    with path.open(newline="", encoding="utf-8") as file:
        return systems(list(csv.DictReader(file)))


def systems(rows: Sequence[Mapping[str, str]]) -> tuple[System, ...]:
    """The systems of these lines whose devices the table knows or nearly knows, with their measurements."""

    def rows_of(system: str, hardware: str = "", placement: str = "") -> tuple[Measurement, ...]:
        key = (system, hardware, placement)
        system_rows = [
            r for r in rows if all(w in r[c] for w, c in zip(key, ("system", "hardware", "placement"), strict=True))
        ]
        return tuple(m for row in system_rows if (m := measurement(row)))

    h100, h200, b200, a100 = map(host_spec, ("h100", "h200", "b200", "a100-80g"))
    launch = h100.device.launch_seconds
    known = [
        System(
            name="nanotron, H100, AWS p5",
            intra=h100.intra,
            inter=AWS_P5_LINK,
            call_seconds=launch,
            measurements=rows_of("nanotron"),
            fitted=("inter.bytes_per_second", "inter.congestion"),
        ),
        # Which network these four nodes have is not said: its bandwidth is fitted, and PyTorch's overhead.
        System(
            name="stas00, 4 nodes of 8",
            intra=a100.intra,
            inter=replace(a100.inter, bytes_per_second=96e9),
            call_seconds=39e-6,
            measurements=rows_of("stas00", "4 nodes"),
            fitted=("inter.bytes_per_second", "call_seconds"),
        ),
        # PyTorch's overhead is in these times, on 2 devices as on 8: fitted.
        System(
            name="Galvatron, 8 NVLink GPUs",
            intra=a100.intra,
            inter=a100.inter,
            call_seconds=55e-6,
            measurements=rows_of("Galvatron"),
            fitted=("intra.bytes_per_second", "call_seconds"),
        ),
    ]
    for name, spec, hardware in (("H200", h200, "H200"), ("B200", b200, "B200")):
        for reduces in (True, False):
            known.append(
                System(
                    name=f"stas00, {name}, SHARP {'on' if reduces else 'off'}",
                    intra=replace(spec.intra, reduces=reduces),
                    inter=spec.inter,
                    call_seconds=launch,
                    measurements=rows_of("stas00", hardware, "SHARP on" if reduces else "SHARP off"),
                    fitted=("intra.bytes_per_second",),
                )
            )
    return tuple(known)


def measurement(row: Mapping[str, str]) -> Measurement | None:
    """The row's measurement, its time from bus bandwidth where none is printed; None where payload or both lack."""
    if row["collective"] not in KINDS or not row["payload_bytes"]:
        return None
    kind, ranks, nbytes = KINDS[row["collective"]], int(row["num_devices"]), int(row["payload_bytes"])
    moved = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * nbytes
    spent = float(row["time_s"]) if row["time_s"] else moved / (1e9 * float(row["busbw_GB_per_s"]))
    return Measurement(kind=kind, ranks=ranks, hosts=int(row["num_nodes"]), nbytes=nbytes, seconds=spent)


def fit(system: System) -> System:
    """The system with its `fitted` numbers changed, one at a time, to the least mean error in the logarithm."""
    best, step = system, 0.5
    while step > 0.002:
        tried = [_changed(best, name, sign * step) for name in best.fitted for sign in (1, -1)]
        better = min(tried, key=_loss)
        best, step = (better, step) if _loss(better) < _loss(best) else (best, step / 2)
    return best


def _loss(system: System) -> float:
    return statistics.fmean(abs(math.log(system.predict(m) / m.seconds)) for m in system.measurements)


def _changed(system: System, name: str, by: float) -> System:
    """The system with one number multiplied by e^by; the exponent of congestion has a scale already: it moves by it."""
    match name.split("."):
        case ["call_seconds"]:
            return replace(system, call_seconds=system.call_seconds * math.exp(by))
        case [end, "congestion"]:
            link = cast(Link, getattr(system, end))
            return replace(system, **{end: replace(link, congestion=max(0.0, link.congestion + by))})
        case [end, number]:
            link = cast(Link, getattr(system, end))
            return replace(system, **{end: replace(link, **{number: getattr(link, number) * math.exp(by)})})
        case _:
            raise ValueError(name)


def local(ranks: Iterable[int] = (2, 8)) -> System:
    """Every kind over groups of `ranks` virtual CPU devices of this machine, all groups at once, measured here."""
    group = local_cluster(jax.devices()).group()
    measurements = tuple(
        Measurement(kind=kind, ranks=n, hosts=1, nbytes=nbytes, seconds=measure(kind, nbytes, n))
        for n in ranks
        for kind in OPERATIONS
        for nbytes in NBYTES
    )
    return System(
        name=f"{DEVICES} virtual CPU devices",
        intra=group.intra,
        inter=group.inter,
        call_seconds=group.device.launch_seconds,
        measurements=measurements,
        fitted=("intra.alpha_seconds", "intra.bytes_per_second"),
    )


def _all_gather(x: jax.Array) -> jax.Array:
    gathered = lax.all_gather(x, "x", tiled=True)
    return lax.dynamic_slice_in_dim(gathered, lax.axis_index("x") * x.size, x.size)


def _reduce_scatter(x: jax.Array) -> jax.Array:
    part = lax.psum_scatter(x, "x", tiled=True)
    return lax.dynamic_update_slice_in_dim(x, part, lax.axis_index("x") * part.size, 0)


def _shift(x: jax.Array) -> jax.Array:
    ranks = lax.axis_size("x")
    return lax.ppermute(x, "x", [(rank, (rank + 1) % ranks) for rank in range(ranks)])


# Each keeps the shape of its operand, so that calls can be chained.
OPERATIONS: dict[Kind, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": partial(lax.psum, axis_name="x"),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": partial(lax.all_to_all, axis_name="x", split_axis=0, concat_axis=0, tiled=True),
    "permute": _shift,
}


def measure(kind: Kind, nbytes: int, ranks: int) -> float:
    """Seconds of one collective within a program: what each further one adds to it."""
    local_nbytes = nbytes // ranks if kind == "all_gather" else nbytes
    return _added_seconds(OPERATIONS[kind], (local_nbytes // 4,), ranks, 2, 12 if nbytes >= 2**22 else 40)


def matmul_flops_per_second(n: int = 512) -> float:
    """The float32 rate of one device on n x n matrices while all devices multiply."""
    return 2 * n**3 / _added_seconds(lambda x: x @ x, (n, n), DEVICES, 0, 20)


def memory_bytes_per_second(nbytes: int = 2**24, times: int = 10) -> float:
    """The rate at which one device reads and writes a large array while all devices do."""

    def add(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, y: y + 1, x)  # a loop keeps additions from merging into one

    return 2 * nbytes * times / _added_seconds(add, (nbytes // 4,), DEVICES, 1, 5)


def launch_seconds() -> float:
    """The least time of one operator, on 8 x 8 numbers."""
    return _added_seconds(lambda x: x @ x, (8, 8), DEVICES, 10, 500)


def _added_seconds(
    operation: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], ranks: int, few: int, many: int
) -> float:
    """Seconds that one more `operation` adds to a program that chains them, over groups of `ranks` devices."""
    mesh = jax.make_mesh((DEVICES // ranks, ranks), ("groups", "x"))
    spec = P(("groups", "x"))
    zeros = jnp.zeros((DEVICES * shape[0], *shape[1:]), jnp.float32)
    operand = jax.device_put(zeros, NamedSharding(mesh, spec))

    def chain(x: jax.Array, length: int) -> jax.Array:
        for _ in range(length):
            x = lax.optimization_barrier(operation(x))
        return x

    def program(length: int) -> Callable[[jax.Array], jax.Array]:
        body = partial(chain, length=length)
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    return (_seconds(program(many), operand) - _seconds(program(few), operand)) / (many - few)


def _seconds(program: Callable[[jax.Array], jax.Array], operand: jax.Array, repeats: int = 15) -> float:
    """The least of several times: others use the machine too."""
    jax.block_until_ready(program(operand))
    spent: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(operand))
        spent.append(time.perf_counter() - start)
    return min(spent)


def measurements_table(system: System) -> Table:
    """Every measurement with its prediction."""
    table = Table("collective", title=system.name, title_justify="left")
    for heading in ("devices", "bytes", "measured", "predicted", "ratio"):
        table.add_column(heading, justify="right")
    for m in system.measurements:
        predicted = system.predict(m)
        times = (quantities.seconds(m.seconds), quantities.seconds(predicted), f"{predicted / m.seconds:.2f}")
        table.add_row(m.kind, f"{m.hosts}x{m.ranks // m.hosts}", quantities.nbytes(m.nbytes), *times)
    return table


def errors_table(systems: Sequence[System]) -> Table:
    """A row for each system: median and largest relative error, and median ratio of predicted to measured."""
    table = Table(title="predicted against measured", title_justify="left")
    table.add_column("system")
    for heading in ("rows", "median error", "largest", "median ratio"):
        table.add_column(heading, justify="right")
    for system in systems:
        errors = system.errors()
        ratio = statistics.median(system.predict(m) / m.seconds for m in system.measurements)
        shares = (f"{100 * statistics.median(errors):.0f} %", f"{100 * max(errors):.0f} %")
        table.add_row(system.name, str(len(errors)), *shares, f"{ratio:.2f}")
    return table


def fit_table(systems: Sequence[System]) -> Table:
    """A row for each system: the numbers that fit best, and the median error with them."""
    table = Table("system", "fitted", title="links that fit best", title_justify="left")
    table.add_column("median error", justify="right")
    for system in systems:
        best = fit(system)
        numbers = [f"{name} {_number(best, name):.3g}" for name in best.fitted]
        table.add_row(system.name, "\n".join(numbers), f"{100 * statistics.median(best.errors()):.0f} %")
    return table


def _number(system: System, name: str) -> float:
    value: object = system
    for part in name.split("."):
        value = getattr(value, part)
    return cast(float, value)


def device_table() -> Table:
    """The rates that one virtual CPU device reaches while all of them work, beside the device table's numbers."""
    device = local_cluster(jax.devices()).group().device
    table = Table("rate of one device", title=f"{DEVICES} virtual CPU devices at once", title_justify="left")
    for heading in ("measured", "device table"):
        table.add_column(heading, justify="right")
    rows = (
        (
            "float32 matrix products, GFLOP/s",
            matmul_flops_per_second() / 1e9,
            device.matmul_flops_per_second("float32") / 1e9,
        ),
        ("memory, GB/s", memory_bytes_per_second() / 1e9, device.memory_bytes_per_second / 1e9),
        ("one operator, us", launch_seconds() * 1e6, device.launch_seconds * 1e6),
    )
    for name, measured, assumed in rows:
        table.add_row(name, f"{measured:.3g}", f"{assumed:.3g}")
    return table


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives",
        description="Compare predicted with measured times of collectives.",
    )
    parser.add_argument("--local", action="store_true", help="measure virtual CPU devices here instead (minutes)")
    parser.add_argument("--fit", action="store_true", help="also print the links that would fit best")
    parser.add_argument(
        "--data", type=Path, default=PUBLISHED, metavar="PATH", help="the published measurements (default: %(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Prints the tables that the command line asks for."""
    args = arguments(argv)
    console = stdout()
    if args.local:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
        console.print(device_table())
    elif not args.data.exists():
        raise SystemExit(
            f"{args.data} does not exist: name collectives_measured.csv with --data, or measure with --local"
        )
    systems = (local(),) if args.local else published(args.data)
    for system in systems:
        console.print(measurements_table(system))
    console.print(errors_table(systems))
    if args.fit:
        console.print(fit_table(systems))


if __name__ == "__main__":
    main()
