"""With a larger memory limit a plan is never slower, and what fits a smaller limit is found within a larger one."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar import Plan
from benchmarks.networks import Design, drawn
from benchmarks.trainings import MODELS, make_state, make_step
from passes.errors import OverBudgetError
from tests.sample import some

OPTIMIZER = optax.sgd(0.05, momentum=0.9)

SHARES = (0.4, 0.7, 1.0)
"""Limits as shares of what the plan without one needs; below the first plan that is found, nothing fits."""


def momentum_step(state: Any, x: jax.Array) -> Any:
    weights, moments = state

    def loss(weights: Any) -> jax.Array:
        y = x
        for inner, outer in weights:
            y = y + jnp.tanh(y @ inner) @ outer
        return jnp.mean(y**2)

    gradients = jax.grad(loss)(weights)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments


def plans(seed: int) -> list[Plan | None]:
    """The plans of a random small network within ascending limits, None where nothing fits."""
    dice = random.Random(seed)
    width, batch = dice.choice((64, 128, 256)), dice.choice((16, 64, 256))
    cluster = dice.choice(("4:v100-16g", "8:a100-80g", "2x2:a100-80g"))
    weights = [tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((width, 2 * width), (2 * width, width)))]
    given = (weights, weights), jax.ShapeDtypeStruct((batch, width), "float32")

    def within(limit: int | None) -> Plan | None:
        planner = autopar.Auto(max_axes=1)
        step = autopar.parallelize(
            momentum_step, cluster=cluster, planner=planner, donate_argnums=0, memory_limit=limit
        )
        try:
            return step.plan(*given)
        except OverBudgetError:
            return None

    free = within(None)
    assert free is not None
    limits = [int(share * free.peak_nbytes) for share in SHARES]
    found = [within(limit) for limit in limits]
    assert all(plan.peak_nbytes <= limit for plan, limit in zip(found, limits, strict=True) if plan)
    return [*found, free]


@pytest.mark.parametrize("seed", some(range(12), quick=1))
def test_with_a_larger_limit_a_plan_is_never_slower(seed: int):
    plans_found = plans(seed)
    fit = [plan for plan in plans_found if plan]
    assert plans_found[-len(fit) :] == fit, "what fits a smaller limit is refused within a larger one"
    assert len(fit) >= 2
    for leaner, larger in itertools.combinations(fit, 2):
        assert larger.step_seconds <= leaner.step_seconds * (1 + 1e-6)
        assert larger.solution.bound <= leaner.step_seconds * (1 + 1e-6), "a plan that fits goes below a bound"


@pytest.mark.slow
def test_a_limit_is_used_where_that_is_faster():
    """A GPT of one layer: what the backward pass computes again takes no room, though budgets count it.

    Within half of what the plan without a limit needs, one that needs a third was known, and a slower one was found,
    said to be near the optimum.
    """
    model = MODELS["gpt"]
    state = jax.eval_shape(partial(make_state, model.module, model.least, OPTIMIZER), jax.random.key(0))
    batch = jax.eval_shape(partial(model.module.example_batch, model.least, 8), jax.random.key(0))

    def within(limit: int | None) -> Plan:
        step = make_step(model.module, model.least, OPTIMIZER)
        planner = autopar.Auto(max_axes=1)
        return autopar.parallelize(
            step, cluster="8:a100-80g", planner=planner, donate_argnums=0, memory_limit=limit
        ).plan(state, batch)

    free = within(None)
    half, third = within(free.peak_nbytes // 2), within(free.peak_nbytes // 3)
    assert third.step_seconds >= half.step_seconds >= max(half.solution.bound, free.step_seconds)
    assert half.step_seconds <= 1.16 * free.step_seconds  # 1.26 before


def bottlenecks(count: int, width: int, batch: int, limit: int | None) -> Plan:
    """The plan of residual blocks that are narrower inside, trained by Adam on eight A100."""
    kind = "bottleneck"
    network = Design(kind=kind, blocks=(kind,) * count, width=width, batch=batch, optimizer="adam").network()
    planner = autopar.Auto(max_axes=1)
    step = autopar.parallelize(
        network.step, cluster="8:a100-80g", planner=planner, donate_argnums=0, memory_limit=limit
    )
    return step.plan(network.state, network.batch)


@pytest.mark.slow
def test_a_plan_that_keeps_more_is_tried_if_recomputing_takes_more_room():
    """Weights of 3072 by 768 and a batch of 256: within .6 of the free plan's memory nothing was found."""
    free = bottlenecks(4, 3072, 256, None)
    limit = int(0.6 * free.peak_nbytes)
    plan = bottlenecks(4, 3072, 256, limit)
    assert plan.peak_nbytes <= limit
    assert "everything" in plan.remat or not plan.remat


@pytest.mark.slow
def test_one_microbatch_is_tried_if_several_need_more_room():
    """Ten recurrent layers: loops that add up gradients need more than the step at once, which fits .7 of its free
    plan's memory; within .85 it was refused, and within .95 it took 1.2 times as long."""
    network = Design(kind="recurrent", blocks=("recurrent",) * 10, width=3072, batch=256, optimizer="sgd").network()

    def plan(limit: int | None = None) -> Plan:
        step = autopar.parallelize(network.step, cluster="8:a100-80g", donate_argnums=0, memory_limit=limit)
        return step.plan(network.state, network.batch)

    free = plan()
    more, most = (plan(int(share * free.peak_nbytes)) for share in (0.85, 0.95))
    assert more.peak_nbytes <= 0.85 * free.peak_nbytes
    assert free.step_seconds <= most.step_seconds <= min(more.step_seconds, 1.1 * free.step_seconds)


@pytest.mark.slow
def test_of_two_variants_that_are_nearly_as_fast_the_one_that_comes_nearer_is_taken():
    """Within .55 of the free plan's memory 151 us were found, and within half of it 145."""
    free = bottlenecks(2, 1024, 64, None)
    half, more = (bottlenecks(2, 1024, 64, int(share * free.peak_nbytes)) for share in (0.5, 0.55))
    assert half.peak_nbytes <= 0.5 * free.peak_nbytes
    assert free.step_seconds <= more.step_seconds <= half.step_seconds * (1 + 1e-6)


@pytest.mark.slow
def test_an_answer_far_above_its_bound_does_not_pass_for_the_best_of_a_mesh():
    """Within .75 of the memory of the plan without a limit, six shared layers took 1.02 times what they take within .7:
    relaxations were rounded to 2.8 ms where 1.1 are possible."""
    network = drawn(6, 0).network()

    def plan(limit: int | None = None) -> Plan:
        step = autopar.parallelize(
            network.step,
            cluster="2x4:v100-16g",
            planner=autopar.Auto(max_axes=2),
            donate_argnums=0,
            memory_limit=limit,
        )
        return step.plan(network.state, network.batch)

    nbytes = plan().peak_nbytes
    less, more = (plan(int(share * nbytes)).step_seconds for share in (0.7, 0.75))
    assert more <= less * (1 + 1e-6)


@pytest.mark.slow
def test_a_hand_made_start_is_improved_within_a_larger_limit_too():
    """AlexNet in bfloat16: within .8 of what it needs the plan was 1.06 times as slow as within .75."""
    model = MODELS["alexnet"]
    config = replace(model.config, hidden=1024, dtype="bfloat16", param_dtype="bfloat16")
    optimizer = optax.adam(1e-4)
    state = jax.eval_shape(partial(make_state, model.module, config, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(model.module.example_batch, config, 256), jax.random.key(0))

    def within(limit: int | None) -> Plan:
        step = make_step(model.module, config, optimizer)
        return autopar.parallelize(step, cluster="4:h100", memory_limit=limit).plan(state, batch)

    free = within(None)
    leaner, larger = (within(int(share * free.peak_nbytes)) for share in (0.75, 0.8))
    assert leaner.peak_nbytes <= 0.75 * free.peak_nbytes
    assert larger.step_seconds <= leaner.step_seconds * (1 + 1e-6)
