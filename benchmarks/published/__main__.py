"""Tables of predictions beside published measurements: `python -m benchmarks.published --help`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.tools.plot import blank
from benchmarks.console import stdout
from benchmarks.lists import names
from benchmarks.published import report
from benchmarks.published.planned import Configuration
from benchmarks.published.rows import Result, Row
from benchmarks.published.running import predict
from benchmarks.published.sources import DATA, NAMES, read, spread
from passes.errors import PlanningError

LIMIT = 24


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description="Plan what papers and public repositories measured, as they configured it, and print predicted "
        "against measured: the error of each row, and for each source mean absolute error and bias of the time, "
        "Kendall's tau inside each sweep, what the configuration predicted to be best loses (regret), the error of "
        "peak memory, precision and recall of out-of-memory. Rows that cannot be expressed are listed with the reason.",
        epilog="example: python -m benchmarks.published --source megatron-sc21,zero-bubble --limit 0 --plot errors.png",
    )
    parser.add_argument(
        "--source", type=names("source", NAMES), default=NAMES, metavar="A,B", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument("--row", metavar="TEXT", help="only rows whose name contains TEXT, whatever --limit says")
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder of CSV files, each recognised by its columns, in place of benchmarks/published/data; again for "
        "more",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=LIMIT,
        metavar="N",
        help="rows that are predicted of each source, evenly spread; 0 for all (default: %(default)s, which takes "
        "minutes; all take an hour)",
    )
    parser.add_argument("--summary", action="store_true", help="leave out the tables of rows and sweeps")
    parser.add_argument("--plans", action="store_true", help="also print the plans of the rows")
    parser.add_argument(
        "--names", action="store_true", help="name every row without a prediction (default: a few for each reason)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted against measured as .png or .svg")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser.parse_args(argv)


def chosen_rows(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """The rows that the command line asks for, with the rows that their throughput is relative to."""
    rows = [row for row in rows if row.source in args.source]
    if args.row is None:
        return spread(rows, args.limit)
    named = [row for row in rows if args.row in row.name]
    bases = {(row.source, row.base) for row in named}
    return [row for row in rows if row in named or (row.source, row.name) in bases]


def predicted(rows: Sequence[Row], console: Console) -> list[Result]:
    """The results of the rows, with a progress bar where there is a terminal."""
    columns = TextColumn("{task.fields[row]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rows", total=len(rows), row="")
        return predict(rows, lambda row: bar.update(task, advance=1, row=f"{row.source}: {row.name}"[:70]))


def show(results: Sequence[Result], args: argparse.Namespace, console: Console) -> None:
    """Prints the tables."""
    if not args.summary:
        for source, members in report.by_source(results).items():
            if any(result.answer for result in members):
                console.print(report.rows_table(source, members))
        if (orders := report.orders_table(results)).row_count:
            console.print(orders)
    if args.plans:
        for question in dict.fromkeys(r.row.question for r in results if r.answer):
            if isinstance(question, Configuration):
                console.print(str(question.plan()), markup=False, highlight=False)
    for line in report.unanswered(results, every_name=args.names):
        console.print(f"no prediction: {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(*report.summaries(results))
    console.print(
        "error, bias: mean absolute and mean error of predictions, as shares of what was measured; tau, regret: means "
        "over sweeps; exact: printed figures that are met within their rounding; out-of-memory: rows that ran out and "
        "were predicted to, of all that ran out",
        highlight=False,
    )


def main(argv: list[str] | None = None) -> int:
    """Prints what the command line asks for; 2 where the data or the plot cannot be had, else 0."""
    args = arguments(argv)
    console = Console(highlight=False, stderr=True) if args.json else stdout()
    jax.config.update("jax_platforms", "cpu")
    try:
        rows, unread = read(args.data or (DATA,))
        if args.plot:
            blank(args.plot)
    except (PlanningError, ValueError) as error:
        console.print(str(error), markup=False)
        return 2
    rows = [row for row in rows if row.source in args.source]
    chosen = chosen_rows(rows, args)
    results = predicted(chosen, console)
    left_out = len(rows) - len(chosen)
    if args.json:
        print(json.dumps(report.to_json(results, left_out, unread), indent=1))
    else:
        show(results, args, console)
        for path in unread:
            console.print(f"not read, as its columns are those of no source: {path}", soft_wrap=True)
        if left_out:
            console.print(f"{left_out} rows left out: --limit 0 predicts them all")
    if args.plot:
        report.draw(results, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
