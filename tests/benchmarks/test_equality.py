"""Differences from `jax.jit` over several steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import beside_jit, equality


def test_a_nan_in_a_later_step_is_a_miss(monkeypatch: pytest.MonkeyPatch):
    """`max` passes over a NaN behind the first number."""
    walk, count = equality.walk, iter(range(2))

    def broken(*args: Any) -> Iterator[tuple[Any, float]]:
        is_planned = next(count) == 1
        for number, (params, loss) in enumerate(walk(*args)):
            factor = np.nan if is_planned and number == 2 else 1.0
            yield jax.tree.map(lambda x, factor=factor: x * factor, params), loss * factor

    monkeypatch.setattr(equality, "walk", broken)
    program = equality.Program(optimizer="sgd", dropout=0.0, precision="float32")
    (result,) = equality.compare(program, ["dp"])
    assert [miss.partition(": ")[2] for miss in result.misses] == [
        "parameters differ by nan, bound 1e-05",
        "losses differ by nan, bound 1e-05",
    ]


@pytest.mark.parametrize(("worst", "misses"), [(0.5, False), (2.0, True), (float("nan"), True)])
def test_rows_that_differ_by_more_than_the_bound_miss_it(worst: float, misses: bool):
    assert beside_jit.print_rows("steps", [], [(("1", "1", "1", "1", "1"), worst)], 1.0) == misses
