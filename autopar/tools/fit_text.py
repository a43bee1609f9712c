"""The tables of `fit`: memory of one device by cause, the choices of each plan, and the largest model that fits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from autopar.tools.fit import Room, Row
from autopar.tools.largest import Largest
from passes.plan import POINTS, Plan
from passes.plan import text as plan_text
from passes.planners import limit_nbytes
from passes.text import Column, Table, quantities

CAUSES: Mapping[str, tuple[str, ...]] = {
    "state": ("parameters", "optimizer state"),
    "gradients": ("gradients",),
    "saved": ("saved for backward",),
}
"""Column -> what it counts; `other` counts the rest."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def tables(room: Room, rows: Sequence[Row], largest: Sequence[Largest], note: str = "") -> tuple[Table, ...]:
    """All tables of the results, with `note` under the last."""
    all_tables = [fit_table(room, rows)]
    if any(row.plan for row in rows):
        all_tables += [how_table(rows), over_time_table(room, rows)]
    all_tables += [
        _largest_table(what, kind) for what in ("batch", "preset") if (kind := [x for x in largest if x.what == what])
    ]
    all_tables += [Table(title="", columns=(), rows=(), note=note)] if note else []
    return tuple(all_tables)


def fit_table(room: Room, rows: Sequence[Row]) -> Table:
    """The table with a row for each plan: seconds of a step, the peak of one device by cause, and the excess over the
    limit.
    """
    written, unit = _written([row.plan.peak_nbytes for row in rows if row.plan])
    cluster = f"{room.cluster.name}, {quantities.count(room.cluster.n_devices, 'device')}"
    limit = quantities.nbytes(limit_nbytes(room.memory_limit) or room.cluster.group().device.memory_nbytes)
    return Table(
        title=f"{cluster}: {unit} of one device; {quantities.nbytes(room.limit_nbytes)} predicted fit in {limit}",
        columns=(
            Column(heading="plan"),
            *(Column(heading=name, right=True) for name in ("step", *CAUSES, "other", "peak", "over")),
        ),
        rows=tuple((row.name, *_cells(row, written)) for row in rows),
    )


def _cells(row: Row, written: quantities.Text) -> tuple[str, ...]:
    """The numbers of a row; `fits` where it is not over."""
    if row.plan is None:
        return ("-",) * (1 + len(CAUSES) + 2) + ("no plan",)
    sizes = (written(nbytes) if nbytes else "-" for nbytes in by_column(row.plan).values())
    over = "fits" if row.fits else written(row.over_nbytes)
    return (quantities.seconds(row.plan.step_seconds), *sizes, written(row.plan.peak_nbytes), over)


def by_column(plan: Plan) -> dict[str, int]:
    """Peak bytes of one device by column."""
    named = {name: sum(plan.nbytes.get(cause, 0) for cause in causes) for name, causes in CAUSES.items()}
    return {**named, "other": plan.peak_nbytes - sum(named.values())}


def _written(sizes: Sequence[int]) -> tuple[quantities.Text, str]:
    """The way in which bytes are written, and their unit: the largest of which the least of `sizes` has one."""
    power, smallest = 0, min(sizes, default=0)
    while smallest >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    places = 0 if power == 0 else 1 if smallest >= 10 * 1024**power else 2
    return lambda nbytes: f"{nbytes / 1024**power:,.{places}f}", _UNITS[power]


def how_table(rows: Sequence[Row]) -> Table:
    """The table of each plan's choices and the source line of its peak, or of the reason why there is no plan."""
    return Table(
        title="how",
        columns=(
            Column(heading="plan"),
            Column(heading="chosen", flexible=True),
            Column(heading="peak at", flexible=True),
        ),
        rows=tuple((row.name, chosen(row), _where(row.plan)) for row in rows),
    )


def chosen(row: Row) -> str:
    """The mesh and the variant of a step, or why there is no plan: `data=4 x tensor=2, 4 microbatches`."""
    if (plan := row.plan) is None:
        return row.refusal.splitlines()[0]
    details = [str(plan.mesh) if plan.mesh.axes else "one device"]
    if plan.microbatches > 1:
        details.append(f"{plan.microbatches:,} microbatches")
    if plan.remat:
        details.append(plan_text.kept(plan.remat))
    if plan.offloaded:
        details.append(f"{quantities.count(len(plan.offloaded), 'input')} in the host's memory")
    return ", ".join(details) + (": the least memory found" if row.refusal else "")


def _where(plan: Plan | None) -> str:
    return plan_text.short(plan.memory.where) if plan and plan.memory and plan.memory.where else ""


def over_time_table(room: Room, rows: Sequence[Row]) -> Table:
    """The table of the bytes of one device over the step, all plans on one scale."""
    reports = {row.name: row.plan.memory.over_time for row in rows if row.plan and row.plan.memory}
    largest = max((max(sizes) for sizes in reports.values() if sizes), default=0)
    full = min(float(largest), room.limit_nbytes) or 1.0
    return Table(
        title=f"memory over the step: a full bar is {quantities.nbytes(full)}{' or more' if largest > full else ''}",
        columns=(Column(heading=""), Column(heading="")),
        rows=tuple((name, plan_text.sparkline(_stretched(sizes), full)) for name, sizes in reports.items() if sizes),
    )


def _stretched(sizes: Sequence[int]) -> list[int]:
    """The bytes of a step at `POINTS` points, however few were kept."""
    return [sizes[point * len(sizes) // POINTS] for point in range(POINTS)]


def _largest_table(what: str, largest: Sequence[Largest]) -> Table:
    return Table(
        title=f"largest {what} that fits",
        columns=(
            Column(heading="plan"),
            Column(heading=what, right=True),
            Column(heading="step", right=True),
            Column(heading="peak", right=True),
            Column(heading="chosen", flexible=True),
        ),
        rows=tuple((entry.name, *_largest_cells(entry)) for entry in largest),
    )


def _largest_cells(entry: Largest) -> tuple[str, ...]:
    """The cells of a row; `or more` where time ran out."""
    refusal = entry.refusal.partition("\n")[0]
    if entry.size is None or entry.row is None or entry.row.plan is None:
        none = "none" if entry.certain else "?"
        return (none, "", "", refusal or ("" if entry.certain else "given up before it was known"))
    size = f"{entry.size:,}" if isinstance(entry.size, int) else entry.size
    plan = entry.row.plan
    seconds, peak = quantities.seconds(plan.step_seconds), quantities.nbytes(plan.peak_nbytes)
    return (
        size if entry.certain else f"{size} or more",
        seconds,
        peak,
        "; ".join(filter(None, (chosen(entry.row), refusal))),
    )


def json_text(room: Room, rows: Sequence[Row], largest: Sequence[Largest], note: str = "") -> str:
    """The results as JSON."""
    data = {
        "cluster": room.cluster.to_json(),
        "limit_nbytes": int(room.limit_nbytes),
        "rows": [row.to_json() for row in rows],
        "largest": [entry.to_json() for entry in largest],
        **({"note": note} if note else {}),
    }
    return json.dumps(data, indent=1)
