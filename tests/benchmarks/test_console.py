"""Tables of benchmarks are whole where no terminal has a width."""

import io
import sys

import pytest
from rich.table import Table

from benchmarks.console import stdout


def test_no_column_is_cut_where_stdout_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", piped := io.StringIO())
    table = Table(*(f"heading {i}" for i in range(20)))
    table.add_row(*(f"cell number {i}" for i in range(20)))
    stdout().print(table)
    text = piped.getvalue()
    assert all(f"heading {i}" in text and f"cell number {i}" in text for i in range(20))
    assert len(text.splitlines()) == 5
    assert max(map(len, text.splitlines())) < 400
