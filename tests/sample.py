"""What of a long row of like cases every run tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], quick: int) -> list[Any]:
    """The first `quick` cases for every run, the others for the slow one."""
    return [case if i < quick else slow(case) for i, case in enumerate(cases)]


def slow(*values: Any) -> Any:
    """A case for the slow run."""
    return pytest.param(*values, marks=pytest.mark.slow)
