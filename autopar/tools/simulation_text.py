"""The tables of a simulation, one row a point of the sweep: a step in comparable figures, days and cost, refusals."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.tools.simulation import Row
from passes.text import Column, Table, quantities

HEADINGS = {"microbatches": "micro", "bandwidth": "links", "network": "between hosts"}
"""Where a column's heading is not what is swept."""

_UNKNOWN = "-"

_NO_TOKENS = "no array of integers says how many tokens a step sees: --tokens-per-step (tokens_per_step=) does"


def tables(rows: Sequence[Row], tokens: float | None, price: float | None, note: str = "") -> tuple[Table, ...]:
    """All tables of the rows, with `note` under the last."""
    all_tables = [step_table(rows)]
    if tokens:
        all_tables.append(training_table(rows, tokens, price))
    if any(row.refusal for row in rows):
        all_tables.append(_refusals(rows))
    return (*all_tables, *([Table(title="", columns=(), rows=(), note=note)] if note else []))


def varied(rows: Sequence[Row]) -> tuple[str, ...]:
    """The names of what differs between rows."""
    values = [row.scenario.values for row in rows if row.scenario]
    names = values[0] if values else {}
    return tuple(name for name in names if name != "devices" and len({v[name] for v in values}) > 1)


def labels(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """The row's values of what differs."""
    return tuple(_written(row.scenario.values[name]) for name in names) if row.scenario else ()


def _written(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,g}" if value % 1 else f"{int(value):,}"


def _label_columns(names: Sequence[str]) -> tuple[Column, ...]:
    words = ("cluster", "planner")
    return tuple(Column(heading=HEADINGS.get(n, n), right=n not in words, flexible=n in words) for n in names)


def step_table(rows: Sequence[Row]) -> Table:
    """The table of one step: seconds, rates of a device, shares of the step, and the peak of a device."""
    names = varied(rows)
    has_bubble = any(row.estimate and row.estimate.bubble for row in rows)
    has_excess = any(row.estimate and not row.fits for row in rows)
    headings = ["step", "TFLOP/s", "MFU", *(["bubble"] if has_bubble else []), "exposed", "peak"]
    headings += ["over"] if has_excess else []
    cells: list[tuple[str, ...]] = []
    for row in rows:
        if (estimate := row.estimate) is None:
            cells.append((*labels(row, names), "no plan", *(_UNKNOWN,) * (len(headings) - 1)))
            continue
        rate = estimate.flops_per_second_per_device
        figures = [quantities.seconds(estimate.step_seconds), _UNKNOWN if rate is None else f"{rate / 1e12:.3g}"]
        figures += [
            _share(estimate.mfu),
            *([_share(estimate.bubble)] if has_bubble else []),
            _share(estimate.exposed_share),
        ]
        figures.append(quantities.nbytes(estimate.peak_nbytes))
        if has_excess:
            figures.append("fits" if row.fits else quantities.nbytes(estimate.peak_nbytes - row.limit_nbytes))
        cells.append((*labels(row, names), *figures))
    return Table(
        title=": ".join(filter(None, ("predicted, not measured", _common(rows)))),
        columns=(*_label_columns(names), *(Column(heading=heading, right=True) for heading in headings)),
        rows=tuple(cells),
        note="TFLOP/s and MFU of a device, by the model's flops without what is computed again; "
        "exposed: communication that is not hidden, as a share of the step",
    )


def _common(rows: Sequence[Row]) -> str:
    """The settings that all rows have in common, in words."""
    first, names = next((row.scenario for row in rows if row.scenario), None), varied(rows)
    if first is None:
        return quantities.count(rows[0].estimate.devices, "device") if rows and rows[0].estimate else ""
    words = [f"{first.cluster.name}" if "cluster" not in names else ""]
    words.append(first.planner_name if "planner" not in names else "")
    usual = {"bandwidth": 1.0, "network": 1.0, "batch": "as is", "microbatches": "as planned"}
    words += [
        f"{name} {_written(first.values[name])}"
        for name in usual
        if name not in names and first.values[name] != usual[name]
    ]
    return ", ".join(filter(None, words))


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else quantities.share(value, 1)


def training_table(rows: Sequence[Row], tokens: float, price: float | None) -> Table:
    """The table of so many tokens: rate, days, and the cost where a device's hour has a price."""
    names = varied(rows)
    headings = ("tokens/step", "tokens/s", "days", *(("cost",) if price is not None else ()))
    cells: list[tuple[str, ...]] = []
    for row in rows:
        estimate, per_step, rate = row.estimate, row.tokens_per_step, row.tokens_per_second
        if estimate is None or per_step is None or rate is None:
            cells.append((*labels(row, names), *(_UNKNOWN,) * len(headings)))
            continue
        figures = [f"{per_step:,.0f}", f"{rate:,.0f}", f"{estimate.days(tokens, per_step):,.3g}"]
        if price is not None:
            cost = estimate.cost(tokens, per_step, price)
            figures.append(f"{cost:,.0f}" if cost >= 100 else f"{cost:.2f}")
        cells.append((*labels(row, names), *figures))
    costs = "" if price is None else f", at {price:g} for a device's hour"
    unknown = any(row.tokens_per_step is None for row in rows)
    return Table(
        title=f"{tokens:,.0f} tokens{costs}",
        columns=(*_label_columns(names), *(Column(heading=heading, right=True) for heading in headings)),
        rows=tuple(cells),
        note=_NO_TOKENS if unknown else "",
    )


def _refusals(rows: Sequence[Row]) -> Table:
    """The table of why there is no plan, or none that fits."""
    names = varied(rows)
    return Table(
        title="what does not fit, or cannot be planned",
        columns=(*_label_columns(names), Column(heading="why", flexible=True)),
        rows=tuple((*labels(row, names), row.refusal.partition("\n")[0]) for row in rows if row.refusal),
    )


def row_json(row: Row, tokens: float | None, price: float | None) -> dict[str, object]:
    """A row as JSON data: numbers in seconds, bytes and flops; what is unknown is null."""
    estimate, data = row.estimate, dict[str, object](row.scenario.values if row.scenario else {})
    if row.refusal:
        data["refusal"] = row.refusal
    if estimate is None:
        return data | {"fits": False}
    data |= {
        "devices": estimate.devices,
        "step_seconds": estimate.step_seconds,
        "model_flops": estimate.flops or None,
        "dtype": estimate.dtype or None,
        "flops_per_second_per_device": estimate.flops_per_second_per_device,
        "mfu": estimate.mfu,
        "bubble": estimate.bubble,
        "exposed_communication_seconds": estimate.exposed_seconds,
        "peak_nbytes": estimate.peak_nbytes,
        "fits": row.fits,
        "tokens_per_step": row.tokens_per_step,
        "tokens_per_second": row.tokens_per_second,
    }
    if tokens and row.tokens_per_step:
        data["days"] = estimate.days(tokens, row.tokens_per_step)
        if price is not None:
            data["cost"] = estimate.cost(tokens, row.tokens_per_step, price)
    return data
