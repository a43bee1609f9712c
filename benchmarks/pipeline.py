"""Predictions for pipelines beside measurements on virtual CPU devices: `python -m benchmarks.pipeline --help`.

Over a grid of schedules, stages and microbatches: bubble and step time, predicted and measured, and the microbatches
whose activations are alive. Then the time that the host takes for an instruction. With `--overlap`, instead: the
speed-up of two stages that run at once in one process, as a share of what the closed form allows.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from benchmarks.console import stdout
from benchmarks.dispatch import BOUNDS, YARDSTICK_NBYTES, dispatch, dispatch_table, yardstick
from benchmarks.loaded_pipeline import Loaded, live_activations, load, mlp
from benchmarks.overlap import SHARE, Overlap, overlap, overlap_table
from benchmarks.trainings import MODELS, Training
from passes.inter_op.schedules import in_flight
from passes.text import quantities

DEVICES = 8
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble-h1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pipeline of the grid: medians of seconds; `live` and `bound` are microbatches in flight [stages]."""

    schedule: str
    n_stages: int
    microbatches: int
    predicted_bubble: float
    measured_bubble: float
    predicted_seconds: float
    measured_seconds: float
    peak_nbytes: int
    live: tuple[int, ...]
    bound: tuple[int, ...]
    run_seconds: float
    send_seconds: float


def measure(loaded: Loaded, rounds: int) -> Row:
    """The pipeline's row; steps, and stages one after another, are timed in turn."""
    steps: list[float] = []
    serial: list[float] = []
    host: dict[str, list[float]] = {}
    for i in range(-1, rounds):
        step, one_by_one, kinds = loaded.seconds(), loaded.serial_seconds(), loaded.host_seconds(alone=False)
        if i >= 0:
            steps.append(step)
            serial.append(one_by_one)
            for kind, seconds in kinds.items():
                host.setdefault(kind, []).extend(seconds)
    plan = loaded.plan
    n_stages = len(plan.stages)
    step = statistics.median(steps)
    return Row(
        schedule=plan.schedule_name,
        n_stages=n_stages,
        microbatches=plan.microbatches,
        predicted_bubble=plan.bubble,
        measured_bubble=1 - statistics.median(serial) / (n_stages * step),
        predicted_seconds=plan.step_seconds,
        measured_seconds=step,
        peak_nbytes=plan.peak_nbytes,
        live=live_activations(loaded.program, n_stages),
        bound=in_flight(plan.schedule),
        run_seconds=statistics.median(host["Run"]),
        send_seconds=statistics.median(host.get("Send", [0.0])),
    )


def grid_table(rows: Sequence[Row], model: str) -> Table:
    """The grid, a pipeline a row."""
    title = f"{model}, stages of one device: predicted, measured"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages", "micro", "bubble", "measured", "step", "measured", "peak", "alive", "bound", "host us"):
        table.add_column(heading, justify="right", no_wrap=heading not in ("alive", "bound"))
    for row in rows:
        alive, bound = (" ".join(map(str, counts)) for counts in (row.live, row.bound))
        table.add_row(
            row.schedule,
            str(row.n_stages),
            str(row.microbatches),
            f"{100 * row.predicted_bubble:.0f} %",
            f"{100 * row.measured_bubble:.0f} %",
            quantities.seconds(row.predicted_seconds),
            quantities.seconds(row.measured_seconds),
            quantities.nbytes(row.peak_nbytes),
            alive,
            bound,
            f"{row.run_seconds * 1e6:.0f}/{row.send_seconds * 1e6:.0f}",
            style="red" if any(a > b for a, b in zip(row.live, row.bound, strict=True)) else None,
        )
    return table


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description=f"Run pipelines of a small model on {DEVICES} virtual CPU devices: bubble, step time and live "
        "activations of schedules, and what an instruction costs the host; or with --overlap two stages at once.",
        epilog="example: python -m benchmarks.pipeline --schedule 1f1b --stages 2 4 --microbatches 8",
    )
    number = {"type": int, "nargs": "+", "metavar": "N"}
    shown = "(default: %(default)s)"
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp", help=f"of the grid {shown}")
    parser.add_argument(
        "--schedule", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help=f"of the grid {shown}"
    )
    parser.add_argument("--stages", default=[2, 4], **number, help=f"of the grid, at most {DEVICES} {shown}")
    parser.add_argument("--microbatches", **number, help="of the grid (default: 4 8), or of --overlap (6 16 24)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help=f"measured steps of each {shown}")
    parser.add_argument("--overlap", action="store_true", help="measure two stages at once, and nothing else")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    args = parser.parse_args(argv)
    args.microbatches = args.microbatches or ([6, 16, 24] if args.overlap else [4, 8])
    if not all(1 <= n <= DEVICES for n in args.stages):
        parser.error(f"--stages {args.stages}: each has a device of its own, and there are {DEVICES}")
    if min(args.microbatches) < 1 or args.rounds < 1:
        parser.error("--microbatches and --rounds are 1 or more")
    return args


def grid(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(schedule, stages, microbatches) of each row."""
    return product(args.schedule, args.stages, args.microbatches)


def training_of(model: str, microbatches: int) -> Training:
    """The model of the grid; a microbatch has one size whatever their number."""
    if model == "gpt":
        return replace(MODELS["gpt"], batch=2 * microbatches).training()
    return mlp(layers=32, width=128, rows=64 * microbatches)


def main(argv: list[str] | None = None) -> int:
    """Prints the tables that the command line asks for; 1 if a target is missed and `--strict` is given, else 0."""
    args = arguments(argv)
    console = stdout()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    misses = show_overlap(args, console) if args.overlap else show_grid(args, console)
    for miss in misses:
        console.print(f"MISSED {miss}", style="red", soft_wrap=True)
    if not misses:
        console.print("all targets met")
    return bool(misses and args.strict)


def show_grid(args: argparse.Namespace, console: Console) -> list[str]:
    """The targets that the grid and the cost of instructions miss, after printing both."""
    rows = [
        measure(
            load(
                training_of(args.model, m), autopar.Pipeline(stages=p, microbatches=m, schedule=s, submeshes=(1,) * p)
            ),
            args.rounds,
        )
        for s, p, m in track(list(grid(args)), "pipelines", console=console, transient=True)
    ]
    console.print(grid_table(rows, args.model))
    cores = len(os.sched_getaffinity(0))
    floors = ", ".join(f"{100 * max(0.0, 1 - cores / p):.0f} % for {p} stages" for p in args.stages)
    console.print(
        "micro: microbatches; bubble: the share of all stages' time in which they wait, predicted, and measured "
        f"against their work one by one; {cores} cores cannot do better than {floors}, which the prediction does not "
        "know; alive: most microbatches whose activations each stage keeps, beside the schedule's bound; host us: "
        "microseconds of the host for one Run / one Send",
    )
    results = [dispatch(submeshes, args.rounds) for submeshes in BOUNDS]
    console.print(dispatch_table(results))
    console.print(
        "in a step: the stages' threads and the host share the cores; alone: nothing else runs meanwhile; yardstick: "
        f"jax.device_put of {YARDSTICK_NBYTES // 1024} KB from device to device, alone: {yardstick() * 1e6:.0f} us"
    )
    over = [
        f"{row.schedule}, {row.n_stages} stages, {row.microbatches} microbatches: alive {row.live}, bound {row.bound}"
        for row in rows
        if any(a > b for a, b in zip(row.live, row.bound, strict=True))
    ]
    return over + [miss for row in results for miss in row.misses]


def show_overlap(args: argparse.Namespace, console: Console) -> list[str]:
    """The targets that two stages at once miss, after printing their table."""
    rows: list[Overlap] = []
    for m in args.microbatches:
        with console.status(f"{m} microbatches"):
            rows.append(overlap(m, args.rounds))
    console.print(overlap_table(rows))
    console.print(
        "serial: the same stages' work one by one; ideal: serial x (m + p - 1) / (m p); share: of the speed-up that "
        f"the closed form allows, target {100 * SHARE:.0f} %, with its bootstrap interval; best: by the fastest "
        "of each; "
        "control: what two programs that have nothing to do with each other gain at once, 2.00 where two cores "
        "are free, without which no target is in reach; threads: busy while the stages run one by one",
    )
    return [
        f"{row.microbatches} microbatches: {100 * row.share:.1f} % of the speed-up that is allowed, "
        f"target {100 * SHARE:.0f} %"
        for row in rows
        if row.share < SHARE
    ]


if __name__ == "__main__":
    raise SystemExit(main())
