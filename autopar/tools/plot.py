"""Memory of one device over a step, drawn with matplotlib, which is optional: `pip install 'autopar[plot]'`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import explain
from autopar.tools.command import unwritable
from passes.errors import PlanningError
from passes.files import write_whole
from passes.memory import PERSISTENT
from passes.plan import Plan
from passes.plan import text as plan_text
from passes.text import quantities

SUFFIXES = (".png", ".svg", ".pdf")

_NEAR = 4
"""A limit is drawn if it is at most so many times the peak; a higher one would leave the rest flat."""


def plot_memory(plans: Mapping[str, Plan], path: str | os.PathLike[str], limit_nbytes: float | None = None) -> None:
    """Draws the bytes of one device over the step into a file, the limit as a line.

    One plan is stacked: what stays for the whole step by cause, the rest on top. Of several, each is a line, and the
    peak of the last is named by its source line. Raises PlanningError without matplotlib, for another kind of file,
    and where no plan says how its memory goes over time.
    """
    figure = blank(path)
    drawn = {name: plan for name, plan in plans.items() if plan.memory and plan.memory.over_time}
    if not drawn:
        rule = "a plan of an earlier autopar, or of no program, does not say how its memory goes over time"
        raise PlanningError(explain(f"plot {path}", rule, "", "plan again, or show the plan without a plot"))
    axes = figure.subplots()
    largest = max(max(_over_time(plan)) for plan in drawn.values())
    scale, unit = _scale(largest)
    if len(drawn) == 1:
        _stack(axes, next(iter(drawn.values())), scale)
    else:
        for name, plan in drawn.items():
            axes.step(*_curve(plan, scale), where="post", label=name, linewidth=1.5)
    if limit_nbytes:
        label = f"limit, {quantities.nbytes(limit_nbytes)}"
        if limit_nbytes <= _NEAR * largest:
            axes.axhline(limit_nbytes / scale, color="black", linestyle="--", linewidth=1, label=label)
        else:
            axes.plot([], [], color="black", linestyle="--", linewidth=1, label=f"{label}: far above")
    _annotate(axes, list(drawn.values())[-1], scale)
    axes.set(xlabel="% of the step's kernels", ylabel=f"{unit} of one device", xlim=(0, 100))
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure into a file. Raises PlanningError where it cannot."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:].lower())
    try:
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise PlanningError(f"{path}: the plot cannot be written: {error.strerror}") from error


def blank(path: str | os.PathLike[str]) -> Any:
    """An empty figure for a file. Raises PlanningError without matplotlib, for another kind of file and where it cannot
    be written.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        rule = f"a plot is a file that ends in {' or '.join(SUFFIXES)}"
        raise PlanningError(explain(f"plot {path}", rule, "", f"write, say, {path.stem or 'memory'}.png"))
    if reason := unwritable(path):
        raise PlanningError(f"{path}: the plot cannot be written: {reason}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        rule = "plots are drawn with matplotlib, which is not installed"
        raise PlanningError(explain(f"plot {path}", rule, "", "pip install 'autopar[plot]'")) from error
    return Figure(figsize=(9, 4), dpi=150, layout="constrained")


def _scale(nbytes: float) -> tuple[float, str]:
    """The unit (bytes, name) in which a number of bytes is written."""
    unit = quantities.nbytes(nbytes).split(" ")[1]
    return 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit), unit


def _over_time(plan: Plan) -> tuple[int, ...]:
    return plan.memory.over_time if plan.memory else ()


def _curve(plan: Plan, scale: float) -> tuple[list[float], list[float]]:
    """The start of each part of the step, in percent, and its bytes; the last is there twice, to its end."""
    sizes = [nbytes / scale for nbytes in _over_time(plan)]
    return [100 * part / len(sizes) for part in range(len(sizes) + 1)], [*sizes, *sizes[-1:]]


def _stack(axes: Any, plan: Plan, scale: float) -> None:
    """Draws the bytes that stay for the whole step, cause by cause, and the rest above them."""
    begins, sizes = _curve(plan, scale)
    stays = {cause: plan.nbytes.get(cause, 0) for cause in (*PERSISTENT, "outputs")}
    layers = {cause: nbytes / scale for cause, nbytes in stays.items() if nbytes > 0}
    transient = [max(0.0, total - sum(layers.values())) for total in sizes]
    series = [[nbytes] * len(begins) for nbytes in layers.values()]
    axes.stackplot(begins, *series, transient, labels=[*layers, "the rest"], step="post", alpha=0.8)


def _annotate(axes: Any, plan: Plan, scale: float) -> None:
    """Marks the peak, with its source line."""
    begins, sizes = _curve(plan, scale)
    at = max(range(len(sizes)), key=sizes.__getitem__)
    where = plan_text.short(plan.memory.where) if plan.memory else ""
    label = f"{quantities.nbytes(plan.peak_nbytes)} {where}".strip()
    centre, in_first_half = begins[min(at, len(begins) - 2)] + 50 / (len(begins) - 1), begins[at] < 50
    axes.annotate(
        label,
        (centre, sizes[at]),
        xytext=(0, 12),
        textcoords="offset points",
        ha="left" if in_first_half else "right",
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
        arrowprops={"arrowstyle": "-", "linewidth": 0.8},
    )
