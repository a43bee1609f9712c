"""A simulation drawn: step, utilization, exposed communication and memory over what is swept. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from autopar.tools.plot import blank, save
from autopar.tools.simulation import Row
from autopar.tools.simulation_text import labels, varied

NUMBERS = ("devices", "batch", "microbatches", "bandwidth", "network")
"""The quantities that can be an axis: the first that varies is."""

Figure = Callable[[Row], float | None]

PANELS: dict[str, Figure] = {
    "step, ms": lambda row: row.estimate and 1e3 * row.estimate.step_seconds,
    "model flops utilization, %": lambda row: row.estimate and row.estimate.mfu and 100 * row.estimate.mfu,
    "exposed communication, % of the step": lambda row: row.estimate and _percent(row.estimate.exposed_share),
    "peak of a device, GiB": lambda row: row.estimate and row.estimate.peak_nbytes / 2**30,
}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def plot_simulation(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Draws four panels over the first number that varies, one line for all that else does; points where none varies.

    Raises PlanningError without matplotlib and for another kind of file.
    """
    figure = blank(path)
    figure.set_size_inches(9, 7)
    axis = axis_of(rows)
    lines = series(rows, axis)
    for number, (title, value) in enumerate(PANELS.items()):
        axes = figure.add_subplot(2, 2, number + 1)
        for name, several in lines.items():
            _line(axes, name, several, value)
        if number == 3:
            _limits(axes, rows)
        axes.set(xlabel=axis or "", ylabel=title)
        if axis:
            places = sorted({x for several in lines.values() for x, _ in several})
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [f"{x:g}" for x in places], minor=False)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", frameon=False, ncols=min(3, len(lines)))
    save(figure, path)


def axis_of(rows: Sequence[Row]) -> str | None:
    """The first number that varies, None where none does."""
    values = [row.scenario.values for row in rows if row.scenario]
    return next((name for name in NUMBERS if len({v[name] for v in values}) > 1), None)


def series(rows: Sequence[Row], axis: str | None) -> dict[str, list[tuple[float | str, Row]]]:
    """Points (x, row) by the words for all that varies beside the axis; x is those words where there is no axis."""
    others = [name for name in varied(rows) if name != axis and not (axis == "devices" and name == "cluster")]
    lines: dict[str, list[tuple[float | str, Row]]] = {}
    for row in rows:
        name = ", ".join(
            word if key in ("planner", "cluster") else f"{key} {word}"
            for key, word in zip(others, labels(row, others), strict=True)
        )
        if row.scenario is None or axis is None:
            lines.setdefault("", []).append((name, row))
        else:
            device = row.scenario.cluster.group().device.name
            kinds = {other.scenario.cluster.group().device.name for other in rows if other.scenario}
            name = f"{device}, {name}".rstrip(", ") if axis == "devices" and len(kinds) > 1 else name
            lines.setdefault(name, []).append((row.scenario.values[axis], row))
    return lines


def _line(axes: Any, name: str, points: Sequence[tuple[float | str, Row]], value: Figure) -> None:
    known = [(x, y) for x, row in points if (y := value(row)) is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], marker="o", markersize=4, linewidth=1.5, label=name)


def _limits(axes: Any, rows: Sequence[Row]) -> None:
    """Draws what a device may need, where that is one number and not far above what is needed."""
    limits = {row.limit_nbytes for row in rows}
    largest = max((row.estimate.peak_nbytes for row in rows if row.estimate), default=0)
    if len(limits) == 1 and (limit := limits.pop()) <= 4 * largest:
        axes.axhline(limit / 2**30, color="black", linestyle="--", linewidth=1)
