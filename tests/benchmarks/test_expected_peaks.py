"""Ratios of expected to real peaks are those of every hand-made plan, and counted beside the factors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from benchmarks.expected_peaks import FACTORS, Row, ratios, table
from passes.cluster import parse_cluster


def test_every_hand_made_plan_that_is_possible_has_a_ratio() -> None:
    step = autopar.parallelize(lambda w, x: w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), donate_argnums=0).step(
        jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    )
    of_plans = list(ratios(step, parse_cluster("2:cpu")))
    assert len(of_plans) == 4  # data parallelism, tensors cut, ZeRO 1 and 3, on the one mesh that there is
    assert of_plans == pytest.approx([1.0] * 4, rel=0.5)


def test_peaks_above_each_factor_are_counted() -> None:
    row = Row(model="gpt", cluster="4:cpu", variant="as it is", ratios=(0.5, 1.0, 1.2, 3.0))
    columns = [list(column.cells) for column in table([row]).columns]
    assert columns[:4] == [["gpt", "all"], ["4:cpu", ""], ["4", "4"], ["0.50", "0.50"]]
    assert [cells[0] for cells in columns[-len(FACTORS) :]] == ["2", "1", "1", "1"]
