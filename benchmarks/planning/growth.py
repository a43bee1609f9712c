"""The growth of planning with layers, devices and mesh shapes: `python -m benchmarks.planning growth --help`."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from autopar.frontend import Traced, trace
from autopar.tools.plot import blank
from benchmarks.console import stdout
from benchmarks.planning import one_mesh
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.intra_op import MeshProblems, cheapest_plan, layouts
from passes.planners import Auto
from passes.step import Step
from passes.text import quantities

LAYERS = (12, 24, 48, 96, 192)
DEVICES = (8, 64, 512, 4096)
AXES = (1, 2, 3)
HOST = 8
"""Devices of a host."""

BOUNDS = {"layers": (48, 192, 1.5), "devices": (64, 4096, 4.0)}
"""From one size to another, planning may take this many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One planning: seconds of tracing and of what follows, the operators, the meshes tried, the gap of the answer."""

    along: str
    size: int
    operators: int
    meshes: int
    trace_seconds: float
    planning_seconds: float
    gap: float

    @property
    def seconds(self) -> float:
        """All seconds of planning."""
        return self.trace_seconds + self.planning_seconds


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning growth",
        description="Plan a GPT (placements, no stages) with more and more unrolled layers, for more and more devices, "
        "on meshes of more and more axes, and print how the time grows. Targets: from 48 to 192 layers at most 1.5 "
        "times, from 64 to 4,096 devices at most 4 times. Exits with 1 where one is missed with --strict.",
        epilog="example: python -m benchmarks.planning growth --along devices --plot growth.png",
    )
    names = tuple(SERIES)
    parser.add_argument("--along", choices=names, action="append", help="what grows; again for more (default: all)")
    parser.add_argument("--model", default="gpt-1.3b", choices=one_mesh.LAYERED, help="(default: %(default)s)")
    parser.add_argument("--kind", default="a100-80g", help="of device (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves as .png or .svg")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    return parser.parse_args(argv)


def traced(model: str, layers: int, batch_size: int) -> tuple[Traced, float]:
    """The model's AdamW step, and the seconds that tracing it took."""
    module, config = one_mesh.MODELS[model]
    step, state = one_mesh.make_step(module, replace(config, layers=layers))
    batch = jax.eval_shape(lambda: module.example_batch(config, batch_size, jax.random.key(0)))
    start = time.perf_counter()
    return trace(step, (state, batch), {}, donate_argnums=(0,)), time.perf_counter() - start


def planned(
    along: str, size: int, program: tuple[Traced, float], cluster: str, axes: int, *, squarest: bool = False
) -> Row:
    """A program planned on every mesh of a cluster with at most so many axes, or on the `squarest` mesh alone."""
    traced, trace_seconds = program
    described = parse_cluster(cluster)
    meshes = layouts(described, described.n_devices, axes)
    meshes = [min(meshes, key=lambda mesh: max(mesh.sizes))] if squarest else meshes
    start = time.perf_counter()
    step = Step(graph=traced.graph, state_pairs=traced.state_pairs, donated=traced.donated)
    plan = cheapest_plan("auto", MeshProblems(step=step), meshes, Auto().solver)
    return Row(
        along=along,
        size=size,
        operators=len(traced.graph.nodes),
        meshes=len(meshes),
        trace_seconds=trace_seconds,
        planning_seconds=time.perf_counter() - start,
        gap=plan.gap,
    )


def by_layers(args: argparse.Namespace) -> Iterator[Row]:
    """One mesh of 64 devices, more layers."""
    for layers in LAYERS:
        yield planned("layers", layers, traced(args.model, layers, 64), f"8x8:{args.kind}", 2, squarest=True)


def by_devices(args: argparse.Namespace) -> Iterator[Row]:
    """Every mesh of one or two axes, more devices; 12 layers and a batch that divides among all of them."""
    program = traced(args.model, LAYERS[0], DEVICES[-1])
    for devices in DEVICES:
        yield planned("devices", devices, program, f"{devices // HOST}x{HOST}:{args.kind}", 2)


def by_axes(args: argparse.Namespace) -> Iterator[Row]:
    """64 devices as meshes of up to one, two and three axes; 12 layers."""
    program = traced(args.model, LAYERS[0], 64)
    for axes in AXES:
        yield planned("axes", axes, program, f"8x8:{args.kind}", axes)


SERIES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "layers": by_layers,
    "devices": by_devices,
    "axes": by_axes,
}


def misses(rows: Sequence[Row]) -> Iterator[str]:
    """The targets that are missed, in words with both numbers."""
    seconds = {(row.along, row.size): row.seconds for row in rows}
    for along, (small, large, limit) in BOUNDS.items():
        if (along, small) in seconds and (along, large) in seconds:
            times = seconds[along, large] / seconds[along, small]
            if times > limit:
                yield f"from {small:,} to {large:,} {along}: {times:.1f} times as long, target {limit:g}"


def table(rows: Sequence[Row], model: str) -> Table:
    """All rows, each with how much longer it took than the one before."""
    table = Table(title=f"Planning {model}", title_justify="left")
    for heading in ("along", "size", "operators", "meshes", "trace", "after tracing", "in all", "/ row before", "gap"):
        table.add_column(heading, justify="left" if heading == "along" else "right")
    previous: Row | None = None
    for row in rows:
        same = previous is not None and previous.along == row.along
        if not same:
            table.add_section()
        table.add_row(
            row.along,
            f"{row.size:,}",
            f"{row.operators:,}",
            str(row.meshes),
            quantities.seconds(row.trace_seconds),
            quantities.seconds(row.planning_seconds),
            quantities.seconds(row.seconds),
            f"{row.seconds / previous.seconds:.2f}" if same and previous else "",
            f"{100 * row.gap:.2g} %",
        )
        previous = row
    return table


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel a series, both axes logarithmic. Raises PlanningError for another kind of file."""
    figure: Any = blank(path)
    names = list(dict.fromkeys(row.along for row in rows))
    for panel, along in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        series = [row for row in rows if row.along == along]
        sizes = [row.size for row in series]
        panel.loglog(sizes, [row.seconds for row in series], marker="o", label="in all")
        panel.loglog(sizes, [row.planning_seconds for row in series], marker="o", label="after tracing")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.set_xlabel(along)
        panel.set_ylabel("seconds")
        panel.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path)


def main(argv: Sequence[str]) -> int:
    """Prints what the command line asks for; 1 if it is strict and a target is missed, 2 if nothing can be drawn."""
    args = arguments(argv)
    console = stdout()
    jax.config.update("jax_platforms", "cpu")
    if args.plot:
        try:
            blank(args.plot)
        except PlanningError as error:
            console.print(str(error), markup=False)
            return 2
    rows: list[Row] = []
    for along in args.along or SERIES:
        for row in SERIES[along](args):
            rows.append(row)
            if not args.json:
                console.print(f"{along} {row.size:,}: {quantities.seconds(row.seconds)}", highlight=False)
    missed = list(misses(rows))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "missed": missed}, indent=2))
    else:
        console.print(table(rows, args.model))
        for line in missed:
            console.print(f"MISSED {line}")
    if args.plot:
        draw(rows, args.plot)
    return 1 if missed and args.strict else 0
