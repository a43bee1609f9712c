"""Plans as text."""

import jax.numpy as jnp

import autopar
from passes.plan import text as plan_text


def test_a_sparkline_is_blank_for_nothing_alone():
    assert plan_text.sparkline([0, 1, 50, 100]) == " ▁▄█"
    assert plan_text.sparkline([1, 300], 100) == "▁█"
    assert plan_text.sparkline([0, 0]) == "  "


def test_a_plan_of_arrays_without_elements_is_printed():
    plan = autopar.parallelize(lambda x: x.reshape(8, 0, 2)).plan(jnp.zeros((0, 8)))
    assert "over the step: 0 B to 0 B" in plan.format()
