"""Quantities in units, and tables that keep to their width."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from passes.text import Column, Table, quantities


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0 s"),
        (1.5e-9, "1.50 ns"),
        (1e-12, "0.00 ns"),
        (1.234e-6, "1.23 us"),
        (999.96e-6, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (59.94, "59.9 s"),
        (9.65, "9.65 s"),
        (4321.0, "4321 s"),
        (float("inf"), "inf s"),
    ],
)
def test_seconds(value, written):
    assert quantities.seconds(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (4.5 * 2**30, "4.50 GiB"),
        (float("inf"), "inf B"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_nbytes(value, written):
    assert quantities.nbytes(value) == written


def test_shares_changes_and_counts():
    assert (quantities.share(1, 8), quantities.share(1, 0)) == ("12.5 %", "-")
    assert [quantities.change(*p) for p in ((2, 2), (2, 3), (2, 1), (0, 1))] == ["=", "+50.0 %", "-50.0 %", "new"]
    assert (quantities.count(1, "device"), quantities.count(2048, "device")) == ("1 device", "2,048 devices")


@given(st.lists(st.tuples(st.text("ab ./]", max_size=90), st.text("xyz", max_size=9)), min_size=1, max_size=4))
def test_wrapping_loses_nothing(rows):
    table = Table(title="", columns=(Column(heading="a", flexible=True), Column(heading="b")), rows=tuple(rows))
    written = table.format(40)
    assert all(len(line) <= 40 for line in written.splitlines())
    for letter in "abxyz./]":
        assert written.count(letter) == sum(cell.count(letter) for cell in itertools.chain(*rows, "ab"))
