"""Tables of benchmarks are whole where no terminal has a width, and their JSON is what every reader takes."""

import io
import json
import sys

import pytest
from rich.table import Table

from benchmarks.console import json_text, stdout


def test_no_column_is_cut_where_stdout_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", piped := io.StringIO())
    table = Table(*(f"heading {i}" for i in range(20)))
    table.add_row(*(f"cell number {i}" for i in range(20)))
    stdout().print(table)
    text = piped.getvalue()
    assert all(f"heading {i}" in text and f"cell number {i}" in text for i in range(20))
    assert len(text.splitlines()) == 5
    assert max(map(len, text.splitlines())) < 400


def test_json_has_null_for_what_is_no_number_of_it() -> None:
    results = {"rows": [{"seconds": float("inf"), "gaps": (0.5, float("nan"))}], "count": 2, "name": "none"}
    assert json.loads(json_text(results)) == {
        "rows": [{"seconds": None, "gaps": [0.5, None]}],
        "count": 2,
        "name": "none",
    }
    assert json_text([1, 2.5], indent=1) == json.dumps([1, 2.5], indent=1)
