"""The tables of what fits: memory of one device by cause, how each plan comes by it, and what is the largest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from autopar.tools.fit import Room, Row
from autopar.tools.largest import Largest
from passes.plan import POINTS, Plan
from passes.plan import text as plan_text
from passes.text import Column, Table, quantities

CAUSES: Mapping[str, tuple[str, ...]] = {
    "state": ("parameters", "optimizer state"),
    "gradients": ("gradients",),
    "saved": ("saved for backward",),
}
"""Column -> what it counts; `other` counts the rest."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def tables(room: Room, rows: Sequence[Row], largest: Sequence[Largest], note: str = "") -> tuple[Table, ...]:
    """Everything that was found, `note` under the last."""
    found = [fit_table(room, rows)]
    if any(row.plan for row in rows):
        found += [how_table(rows), over_time_table(room, rows)]
    found += [
        _largest_table(what, kind) for what in ("batch", "preset") if (kind := [x for x in largest if x.what == what])
    ]
    found += [Table(title="", columns=(), rows=(), note=note)] if note else []
    return tuple(found)


def fit_table(room: Room, rows: Sequence[Row]) -> Table:
    """A plan a row: seconds of a step, the peak of one device by cause, and by how much it is over the limit."""
    written, unit = _written([row.plan.peak_nbytes for row in rows if row.plan])
    cluster = f"{room.cluster.name}, {quantities.count(room.cluster.n_devices, 'device')}"
    return Table(
        title=f"{cluster}: {unit} of one device, which may hold {quantities.nbytes(room.limit_nbytes)}",
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
    held = (written(nbytes) if nbytes else "-" for nbytes in by_column(row.plan).values())
    over = "fits" if row.fits else written(row.over_nbytes)
    return (quantities.seconds(row.plan.step_seconds), *held, written(row.plan.peak_nbytes), over)


def by_column(plan: Plan) -> dict[str, int]:
    """Peak bytes of one device by column."""
    named = {name: sum(plan.nbytes.get(cause, 0) for cause in causes) for name, causes in CAUSES.items()}
    return {**named, "other": plan.peak_nbytes - sum(named.values())}


def _written(sizes: Sequence[int]) -> tuple[quantities.Text, str]:
    """(how bytes are written, their unit): the largest of which the least of `sizes` has one."""
    power, least = 0, min(sizes, default=0)
    while least >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    places = 0 if power == 0 else 1 if least >= 10 * 1024**power else 2
    return lambda nbytes: f"{nbytes / 1024**power:,.{places}f}", _UNITS[power]


def how_table(rows: Sequence[Row]) -> Table:
    """What each plan chose, and the source line of its peak; why there is none where there is none."""
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
    """The mesh and the form of a step, or why there is no plan: `data=4 x tensor=2, 4 microbatches`."""
    if (plan := row.plan) is None:
        return row.refusal.splitlines()[0]
    words = [str(plan.mesh) if plan.mesh.axes else "one device"]
    if plan.microbatches > 1:
        words.append(f"{plan.microbatches:,} microbatches")
    if plan.remat:
        words.append(plan_text.kept(plan.remat))
    if plan.offloaded:
        words.append(f"{quantities.count(len(plan.offloaded), 'input')} in the host's memory")
    return ", ".join(words) + (": the leanest found" if row.refusal else "")


def _where(plan: Plan | None) -> str:
    return plan_text.short(plan.memory.where) if plan and plan.memory and plan.memory.where else ""


def over_time_table(room: Room, rows: Sequence[Row]) -> Table:
    """Bytes of one device over the step, all plans on one scale."""
    reports = {row.name: row.plan.memory.over_time for row in rows if row.plan and row.plan.memory}
    most = max((max(held) for held in reports.values() if held), default=0)
    full = min(float(most), room.limit_nbytes) or 1.0
    return Table(
        title=f"memory over the step: a full bar is {quantities.nbytes(full)}{' or more' if most > full else ''}",
        columns=(Column(heading=""), Column(heading="")),
        rows=tuple((name, plan_text.sparkline(_stretched(held), full)) for name, held in reports.items() if held),
    )


def _stretched(held: Sequence[int]) -> list[int]:
    """The same step at `POINTS` points, however few were kept."""
    return [held[point * len(held) // POINTS] for point in range(POINTS)]


def _largest_table(what: str, found: Sequence[Largest]) -> Table:
    return Table(
        title=f"largest {what} that fits",
        columns=(
            Column(heading="plan"),
            Column(heading=what, right=True),
            Column(heading="step", right=True),
            Column(heading="peak", right=True),
            Column(heading="chosen", flexible=True),
        ),
        rows=tuple((one.name, *_largest_cells(one)) for one in found),
    )


def _largest_cells(one: Largest) -> tuple[str, ...]:
    """The numbers of a row; `or more` where time ran out."""
    refusal = one.refusal.partition("\n")[0]
    if one.size is None or one.row is None or one.row.plan is None:
        none = "none" if one.certain else "?"
        return (none, "", "", refusal or ("" if one.certain else "given up before it was known"))
    size = f"{one.size:,}" if isinstance(one.size, int) else one.size
    plan = one.row.plan
    seconds, peak = quantities.seconds(plan.step_seconds), quantities.nbytes(plan.peak_nbytes)
    return (
        size if one.certain else f"{size} or more",
        seconds,
        peak,
        "; ".join(filter(None, (chosen(one.row), refusal))),
    )


def json_text(room: Room, rows: Sequence[Row], largest: Sequence[Largest], note: str = "") -> str:
    """The same as JSON."""
    data = {
        "cluster": room.cluster.to_json(),
        "limit_nbytes": int(room.limit_nbytes),
        "rows": [row.to_json() for row in rows],
        "largest": [one.to_json() for one in largest],
        **({"note": note} if note else {}),
    }
    return json.dumps(data, indent=1)
