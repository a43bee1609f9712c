"""Results as tables, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from autopar.tools.plot import blank
from benchmarks.published.rows import Answer, Result, Row
from benchmarks.published.scores import Score, is_met, score, sweeps
from passes.text import quantities

FEW = 3
"""Names that are shown of rows that share a reason."""


def summaries(results: Sequence[Result]) -> list[Table]:
    """The scores of each source: of time, fitted and judged rows apart, and of memory."""
    words = {
        True: "time, fitted rows: numbers of autopar or of clusters come from them",
        False: "time, judged rows: no number comes from them",
    }
    tables = [_scores(results, title, TIME, fitted=fitted) for fitted, title in words.items()]
    tables.append(_scores(results, "peak memory of a device, judged rows", MEMORY, fitted=False))
    return [table for table in tables if table.row_count]


def _scores(
    results: Sequence[Result], title: str, columns: Mapping[str, Callable[[Score], str]], *, fitted: bool
) -> Table:
    """A source a row, scored on its fitted rows or on its judged ones; sources without such rows are left out."""
    shown = Table(title=title, title_justify="left", padding=(0, 0))
    shown.add_column("source", no_wrap=True)
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    for source, source_results in by_source(results).items():
        members = [r for r in source_results if r.row.fitted == fitted]
        cells = [text(score(members)) for text in columns.values()] if members else []
        if any(cells):
            shown.add_row(source, *cells)
    return shown


def by_source(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each source."""
    return {name: [r for r in results if r.row.source == name] for name in dict.fromkeys(r.row.source for r in results)}


def _met(result: Score) -> str:
    return f"{result.met}/{result.printed}" if result.printed else ""


TIME: Mapping[str, Callable[[Score], str]] = {
    "rows": lambda s: str(s.timed) if s.timed else "",
    "error": lambda s: _share(s.mape),
    "bias": lambda s: _signed(s.bias),
    "worst": lambda s: _signed(s.worst),
    "tau": lambda s: "" if s.tau is None else f"{s.tau:.2f}",
    "regret": lambda s: _share(s.regret),
    "exact": lambda s: _met(s) if s.timed else "",
}

MEMORY: Mapping[str, Callable[[Score], str]] = {
    "rows": lambda s: str(s.weighed) if s.weighed else "",
    "error": lambda s: _share(s.memory_mape),
    "bias": lambda s: _signed(s.memory_bias),
    "range": lambda s: f"{s.memory_least:.2f}-{s.memory_most:.2f}x" if s.weighed else "",
    "exact": lambda s: _met(s) if s.weighed else "",
    "out-of-memory": lambda s: f"{s.caught} of {s.positives}" if s.judged_memory else "",
    "precision": lambda s: _share(s.precision),
    "recall": lambda s: _share(s.recall),
}


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def rows_table(source: str, results: Sequence[Result]) -> Table:
    """The rows of a source that have a prediction: step seconds and peak bytes, predicted and measured."""
    shown = Table(title=source, title_justify="left", padding=(0, 0))
    shown.add_column("row")
    for name in ("predicted time", "measured", "error", "predicted peak", "measured", "error", "predicted to fit"):
        shown.add_column(name, justify="right", no_wrap=True)
    for result in results:
        row, answer = result.row, result.answer
        if answer is None:
            continue
        fits = "" if row.out_of_memory is None else _fitting(answer, row)
        times = _pair(answer.seconds, row.seconds, result.seconds_ratio, _times if row.base else quantities.seconds)
        memory = _pair(answer.nbytes, row.nbytes, result.nbytes_ratio, quantities.nbytes)
        style = "red" if row.rounding and not is_met(result) else None
        shown.add_row(row.name, *times, *memory, fits, style=style)
    return shown


def _times(steps: float) -> str:
    return f"{steps:.3f} steps"


def _pair(
    predicted: float | None, measured: float | None, ratio: float | None, text: Callable[[float], str]
) -> tuple[str, str, str]:
    shown = ("" if value is None else text(value) for value in (predicted, measured))
    first, second = shown
    return first, second, _signed(None if ratio is None else ratio - 1)


def _fitting(answer: Answer, row: Row) -> str:
    """Words for whether a row fits memory, as predicted and as it was."""
    predicted = {True: "no", False: "yes", None: "?"}[answer.is_out_of_memory]
    return f"{predicted}, and {'did not' if row.out_of_memory else 'did'}"


def orders_table(results: Sequence[Result]) -> Table:
    """Tau and regret of every sweep."""
    shown = Table(title="order inside each sweep", title_justify="left", padding=(0, 0))
    for name in ("source", "sweep"):
        shown.add_column(name)
    for name in ("rows", "tau", "regret"):
        shown.add_column(name, justify="right", no_wrap=True)
    for sweep in sweeps(results):
        order = "" if sweep.tau is None else f"{sweep.tau:.2f}"
        shown.add_row(sweep.source, sweep.name, str(sweep.rows), order, _share(sweep.regret))
    return shown


def unanswered(results: Sequence[Result], *, every_name: bool) -> list[str]:
    """A line for each source and reason why rows have no prediction, with `FEW` of their names, or with every name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.answer is None:
            groups.setdefault((result.row.source, result.why), []).append(result.row.name)
    lines: list[str] = []
    for (source, why), group in groups.items():
        some = group if every_name else group[:FEW]
        more = f"; and {len(group) - len(some)} more" if len(group) > len(some) else ""
        lines.append(f"{source}, {len(group)} rows: {why} ({'; '.join(some)}{more})")
    return lines


def to_json(results: Sequence[Result], left_out: int, unread: Sequence[Path]) -> Mapping[str, object]:
    """All rows, with measurements and predictions, and all scores, as plain data."""
    return {
        "rows": [_json_row(result) for result in results],
        "scores": {
            words: {
                name: asdict(summary) | {"precision": summary.precision, "recall": summary.recall}
                for name, source_results in by_source(results).items()
                if (members := [r for r in source_results if r.row.fitted == fitted]) and (summary := score(members))
            }
            for words, fitted in (("judged", False), ("fitted", True))
        },
        "sweeps": [asdict(sweep) for sweep in sweeps(results)],
        "left_out_by_limit": left_out,
        "unread_files": [str(path) for path in unread],
    }


def _json_row(result: Result) -> dict[str, object]:
    row, answer = result.row, result.answer or Answer()
    return {
        "source": row.source,
        "sweep": row.sweep,
        "name": row.name,
        "fitted": row.fitted,
        "base": row.base,
        "measured_seconds": row.seconds,
        "predicted_seconds": answer.seconds,
        "measured_rate": row.work / row.seconds if row.seconds else None,
        "predicted_rate": row.work / answer.seconds if answer.seconds else None,
        "unit": row.unit,
        "measured_nbytes": row.nbytes,
        "predicted_nbytes": answer.nbytes,
        "limit_nbytes": answer.limit_nbytes,
        "ran_out_of_memory": row.out_of_memory,
        "predicted_out_of_memory": answer.is_out_of_memory,
        "why_not": result.why,
    }


def draw(results: Sequence[Result], path: Path) -> None:
    """Draws measured and predicted seconds and bytes, a colour a source. Raises PlanningError without matplotlib."""
    figure = blank(path)
    figure.set_size_inches(12, 6)
    panels = figure.subplots(1, 2)
    for panel, what, unit in zip(panels, ("seconds", "nbytes"), ("seconds of a step", "peak bytes"), strict=True):
        ends: list[float] = []
        for source, source_results in by_source(results).items():
            pairs = [
                (getattr(r.row, what), getattr(r.answer, what))
                for r in source_results
                if getattr(r, f"{what}_ratio") is not None and not r.row.base
            ]
            if pairs:
                measured, predicted = zip(*pairs, strict=True)
                panel.scatter(measured, predicted, s=12, alpha=0.7, label=source)
                ends += [*measured, *predicted]
        if ends:
            line = [min(ends), max(ends)]
            panel.plot(line, line, color="black", linewidth=0.8)
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.legend(fontsize=8)
        panel.set_xlabel(f"measured {unit}")
        panel.set_ylabel(f"predicted {unit}")
        panel.grid(alpha=0.3)
    figure.savefig(path)
