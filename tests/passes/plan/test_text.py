"""Plans as text."""

import jax
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


def test_an_input_named_with_a_star_has_a_row_of_its_own():
    """It shared one with numbered names, and printing the plan raised ValueError."""

    def step(params, x):
        gradients = jax.grad(lambda p: sum(jnp.mean((x @ w) ** 2) for w in p.values()))(params)
        return jax.tree.map(jnp.subtract, params, gradients)

    args = {name: jnp.ones((4096, 4096)) for name in ("w*", "w1", "w2")}, jnp.ones((64, 4096))
    planners = autopar.DataParallel(), autopar.Zero()
    whole, cut = (autopar.parallelize(step, cluster="1x4:h100", planner=each).plan(*args) for each in planners)
    assert "params['w*']" in cut.format()
    assert "params['w*']" in str(whole.diff(cut))
