"""Stages of hand-made pipelines are even in seconds: of a lookup, a scan or a loss flops say little."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from passes.cluster import parse_cluster
from passes.layers import stage_cuts
from passes.pipeline import body_of, weigh_on
from passes.plan import PipelinePlan
from passes.step import Variant

CLUSTER = parse_cluster("4:h100")
WIDTH, VOCABULARY, LENGTH, ROWS, BLOCKS = 64, 4096, 128, 64, 8
NEARLY = 1.02
"""A gradient that is added up may count in another part where there are more."""


def recurrent(tokens: Any, weights: Any) -> Any:
    """The mean square of a stack of recurrent layers over looked up tokens, before a wide last layer."""
    h = weights["table"][tokens]
    for weight in weights["blocks"]:

        def cell(state: Any, x: Any, weight: Any = weight) -> tuple[Any, Any]:
            state = jnp.tanh(x + state @ weight)
            return state, state

        h = h + jax.lax.scan(cell, jnp.zeros((len(h), WIDTH)), h.swapaxes(0, 1))[1].swapaxes(0, 1)
    return jnp.mean((h @ weights["head"]) ** 2)


def train_step(weights: Any, tokens: Any) -> tuple[Any, Any]:
    loss, gradients = jax.value_and_grad(recurrent, argnums=1)(tokens, weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def shapes() -> tuple[Any, Any]:
    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    table = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    head = jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32)
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    return {"table": table, "blocks": [square] * BLOCKS, "head": head}, tokens


def planned(planner: Any) -> PipelinePlan:
    plan = autopar.parallelize(train_step, cluster="4:h100", planner=planner).plan(*shapes())
    assert isinstance(plan, PipelinePlan)
    return plan


def stage_seconds(plan: PipelinePlan) -> list[float]:
    return [cost.forward_seconds + cost.backward_seconds for cost in plan.costs]


def test_recurrent_stages_take_even_time() -> None:
    """By flops the last layer weighed more than all recurrent ones, of which a stage had most."""
    each = stage_seconds(planned(autopar.GPipe(stages=4, microbatches=4)))
    assert max(each) < 1.15 * sum(each) / len(each)


@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_no_cut_between_blocks_has_a_shorter_longest_stage(n_stages: int) -> None:
    step = autopar.parallelize(train_step, cluster="4:h100").step(*shapes())
    body, weigh = body_of(step.variant(Variant(microbatches=4, stages=n_stages)).graph), weigh_on(CLUSTER)
    places = sorted({first for n in range(2, BLOCKS + 1) for first in stage_cuts(body, n, weigh=weigh)})
    longest = {cuts: max(weigh(body, (0, *cuts))) for cuts in itertools.combinations(places[1:], n_stages - 1)}
    assert max(weigh(body, stage_cuts(body, n_stages, weigh=weigh))) <= min(longest.values()) * NEARLY


def test_seconds_of_parts_are_those_of_their_stages() -> None:
    plan = planned(autopar.Pipeline(stages=4, microbatches=4))
    step = autopar.parallelize(train_step, cluster="4:h100").step(*shapes())
    body = body_of(step.variant(Variant(microbatches=4, stages=4)).graph)
    assert list(weigh_on(CLUSTER)(body, plan.firsts)) == pytest.approx(stage_seconds(plan), rel=0.05)


def test_searched_stages_are_no_slower_than_hand_made_ones() -> None:
    searched = autopar.parallelize(train_step, cluster="4:h100", planner=autopar.Auto(stages=4)).plan(*shapes())
    assert searched.step_seconds <= planned(autopar.Pipeline(stages=4, microbatches=8)).step_seconds * (1 + 1e-9)
