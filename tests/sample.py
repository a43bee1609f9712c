"""Samples of long rows of like cases: which of them every run tests, and which only the slow one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], quick: int) -> list[Any]:
    """The first `quick` cases for every run, the others for the slow one."""
    return [case if i < quick else slow(case) for i, case in enumerate(cases)]


def each(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of the cases of several axes: as few as have each case for every run."""
    known = [list(axis) for axis in axes]
    quick = {tuple(number % len(axis) for axis in known) for number in range(max(map(len, known)))}
    combined = itertools.product(*map(enumerate, known))
    return [
        values if places in quick else slow(*values)
        for places, values in (zip(*combination, strict=True) for combination in combined)
    ]


def half(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of the cases of several axes: half of them, with each case, for every run."""
    combined = itertools.product(*map(enumerate, axes))
    return [
        values if sum(places) % 2 == 0 else slow(*values)
        for places, values in (zip(*combination, strict=True) for combination in combined)
    ]


def slow(*values: Any) -> Any:
    """A case for the slow run."""
    return pytest.param(*values, marks=pytest.mark.slow)
