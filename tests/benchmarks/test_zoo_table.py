"""The zoo's tables: which plans count as baselines, and when a comparison has its columns."""

from __future__ import annotations

import pytest

from benchmarks.zoo import AUTOPAR, COMPARED, Checked, Found, missed, times_table

CHECKED = Checked(mesh="2x4", difference=0.0, collectives={}, planned_nbytes=1, compiled_nbytes=1, unplanned=0)


def found(**seconds: float) -> Found:
    return Found(
        model="gpt",
        mesh="2x4",
        collectives={},
        planning_seconds=1.0,
        predicted_seconds=1.0,
        seconds={name: (spent,) * 4 for name, spent in seconds.items()},
        checked=CHECKED,
    )


def test_a_compared_plan_is_no_baseline() -> None:
    result = found(**{AUTOPAR: 3.0, "dp": 4.0, "fsdp": 2.0, COMPARED: 1.0})
    assert result.best == "fsdp"
    assert result.ratio[0] == pytest.approx(1.5)
    assert result.compared_ratio
    assert result.compared_ratio[0] == pytest.approx(0.5)
    (miss,) = missed([result])
    assert "1.500 times fsdp" in miss


def test_a_comparison_has_columns_only_where_it_was_asked_for() -> None:
    plain, compared = found(**{AUTOPAR: 3.0, "dp": 4.0}), found(**{AUTOPAR: 3.0, "dp": 4.0, COMPARED: 2.0})
    assert plain.compared_ratio is None
    headings = [[str(column.header) for column in times_table([result]).columns] for result in (plain, compared)]
    assert "compared / best" not in headings[0]
    assert headings[1][-2:] == ["compared / best", "95 %"]
    (cells,) = zip(*(column.cells for column in times_table([compared]).columns), strict=True)
    assert cells[-4:] == ("0.75", "0.75-0.75", "0.50", "0.50-0.50")
