"""Seconds to plan large models for large clusters, each in a process: `python -m benchmarks.planning cases --help`."""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.console import stdout
from passes.text import quantities


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model planned for a cluster, on one mesh or in stages, and the most seconds that it may take, tracing included.

    `after` is the target of the seconds after tracing, if there is one.
    """

    model: str
    cluster: str
    batch: int
    bound: float
    mesh: str = ""
    after: float | None = None


CASES = {
    "llama": Case(model="llama-3-8b", cluster="8x8:a100-80g", batch=64, mesh="8x8", bound=6.0, after=2.0),
    "39b-mesh": Case(model="gpt-39b", cluster="8x8:v100-16g", batch=64, mesh="8x8", bound=8.0, after=3.0),
    "39b": Case(model="gpt-39b", cluster="8x8:v100-16g", batch=1024, bound=20.0),
    "moe": Case(model="moe-70b", cluster="8x8:v100-16g", batch=1024, bound=60.0),
    "wide-resnet": Case(model="wide-resnet-13b", cluster="8x8:v100-16g", batch=1536, bound=60.0),
    "1t": Case(model="gpt-1t", cluster="384x8:a100-80g", batch=3072, bound=60.0),
}
"""The cases by the name that --case takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Median seconds of a case's phases, integer programs asked for and solved, the gap and the predicted step.

    `gap` is the largest of any stage; `rss_nbytes` the most memory that the process held.
    """

    case: Case
    trace: float
    solve: float
    partition: float
    total: float
    programs: int
    solved: int
    gap: float
    step_seconds: float
    rss_nbytes: int

    @property
    def missed(self) -> bool:
        """Whether planning took longer than its targets: in all, and after tracing."""
        late = self.case.after is not None and self.total - self.trace > self.case.after
        return late or self.total > self.case.bound


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning cases",
        description="Plan large models for large clusters, each in a fresh process, and print what every part took.",
        epilog="example: python -m benchmarks.planning cases --case 39b --case moe --repeat 3",
    )
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="give it again for more (default: all)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="median of N (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    return parser.parse_args(argv)


def plan(case: Case) -> dict[str, Any]:
    """The row of a case, as `benchmarks.planning` prints it. Raises CalledProcessError if it fails."""
    kind = ["--mesh", case.mesh] if case.mesh else ["--pipeline"]
    options = ["--model", case.model, "--cluster", case.cluster, "--batch", str(case.batch), *kind, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning", *options], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def row(case: Case, runs: Sequence[dict[str, Any]]) -> Row:
    """The row of a case, from as many runs."""

    def median(*path: str) -> float:
        return statistics.median(sum(run["seconds"][name] for name in path) for run in runs)

    last = runs[-1]
    if case.mesh:
        spent = [{name: cost["wall"] for name, cost in run["spent"].items()} for run in runs]
        return Row(
            case=case,
            trace=statistics.median(costs["trace"] for costs in spent),
            solve=statistics.median(costs["tables"] + costs["build and solve"] for costs in spent),
            partition=0.0,
            total=statistics.median(costs["in all"] for costs in spent),
            programs=last["sizes"]["integer programs asked"],
            solved=last["sizes"]["relaxations solved"],
            gap=last["gap"],
            step_seconds=last["objective"],
            rss_nbytes=last["rss_nbytes"],
        )
    return Row(
        case=case,
        trace=median("trace", "microbatches"),
        solve=median("whole", "price", "realise"),
        partition=median("partition"),
        total=statistics.median(run["total"] for run in runs),
        programs=last["tables"],
        solved=last["priced"],
        gap=last["gap"],
        step_seconds=last["step_seconds"],
        rss_nbytes=last["rss_nbytes"],
    )


def table(rows: Sequence[Row]) -> Table:
    """A column for every case, with its parts, its target and what it holds."""
    shown = Table("", *(row.case.model for row in rows), title="planning in a new process", title_justify="left")
    for column in shown.columns[1:]:
        column.justify = "right"
    lines: dict[str, Callable[[Row], str]] = {
        "cluster": lambda row: row.case.cluster,
        "mesh": lambda row: row.case.mesh or "stages",
        "trace": lambda row: quantities.seconds(row.trace),
        "build, solve": lambda row: quantities.seconds(row.solve),
        "partition": lambda row: quantities.seconds(row.partition),
        "total": lambda row: quantities.seconds(row.total),
        "target": lambda row: quantities.seconds(row.case.bound),
        "after tracing": lambda row: quantities.seconds(row.total - row.trace),
        "its target": lambda row: quantities.seconds(row.case.after) if row.case.after else "",
        "targets": lambda row: "missed" if row.missed else "met",
        "programs asked": lambda row: f"{row.programs:,}",
        "programs solved": lambda row: f"{row.solved:,}",
        "gap": lambda row: f"{100 * row.gap:.2g} %",
        "step": lambda row: quantities.seconds(row.step_seconds),
        "RSS": lambda row: quantities.nbytes(row.rss_nbytes),
    }
    for label, cell in lines.items():
        shown.add_row(label, *map(cell, rows))
    return shown


def main(argv: Sequence[str]) -> int:
    """Prints what the command line asks for; 1 if it is strict and a target is missed."""
    args = arguments(argv)
    console, rows = stdout(), list[Row]()
    for name in args.case or CASES:
        case = CASES[name]
        with console.status(f"planning {case.model} on {case.cluster}"):
            rows.append(row(case, [plan(case) for _ in range(args.repeat)]))
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        console.print(table(rows))
    return 1 if args.strict and any(row.missed for row in rows) else 0
