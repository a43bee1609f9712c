"""Plans within a memory limit are brought nearer to the optimum, until the gap that was asked for."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.frontend import trace
from passes.cluster import parse_cluster
from passes.intra_op import MeshProblems, MeshSearch, named, proving, restrictions
from passes.limits import Limits
from passes.solver import SolverOptions
from passes.step import Step

SHARE = 0.7
"""Of what the plan without a limit needs."""


def step(weights: Any, moments: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        out = x
        for up, down in weights:
            out = out + jnp.tanh(out @ up) @ down
        return (out**2).sum()

    gradients = jax.grad(loss)(weights)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda w, m: w - 1e-3 * m, weights, moments), moments


def searched(share: float) -> tuple[MeshSearch, Limits]:
    """A search on two meshes that found a plan within a share of what the one without a limit needs; and the limits."""
    weights = [(jax.ShapeDtypeStruct((256, 512), "float32"), jax.ShapeDtypeStruct((512, 256), "float32"))] * 2
    args = weights, weights, jax.ShapeDtypeStruct((128, 256), "float32")
    traced = trace(step, args, {}, donate_argnums=(0, 1))
    problems = MeshProblems(step=Step(graph=traced.graph, state_pairs=traced.state_pairs, donated=traced.donated))
    search = MeshSearch(
        planner="auto", problems=problems, options=SolverOptions(), hand_made_plans=restrictions.hand_made_plans
    )
    cluster = parse_cluster("8:a100-80g")
    search.over([named(cluster, ("x", 8)), named(cluster, ("x", 2), ("y", 4))])
    limits = Limits.equal(share * search.cheapest.peak_nbytes)
    assert search.cheapest_within(limits)
    return search, limits


@pytest.mark.parametrize("share", [SHARE, 1.0])
def test_a_plan_nearer_to_the_optimum_keeps_the_limit_and_takes_no_longer(share: float):
    search, limits = searched(share)
    first = search.cheapest_within(limits)
    nearer = search.closer(limits)
    assert first
    assert nearer
    assert nearer.peak_nbytes <= limits.searched
    assert nearer.step_seconds <= first.step_seconds
    assert first.solution.bound <= nearer.solution.bound <= nearer.step_seconds
    if share == 1.0:  # where the plan without a limit fits, it is that, to the end
        assert nearer.step_seconds == search.cheapest.step_seconds
        assert nearer.gap <= SolverOptions().gap


def test_no_more_is_proven_than_is_enough():
    search, limits = searched(SHARE)
    most = search.closer(limits)
    assert most
    enough = 0.5 * most.solution.bound
    less = search.closer(limits, enough=enough)
    assert less
    assert less.solution.bound <= enough


def test_nothing_is_looked_for_that_takes_longer_than_is_known(monkeypatch: pytest.MonkeyPatch):
    search, limits = searched(SHARE)
    first = search.cheapest_within(limits)
    assert first
    cutoffs: list[float] = []
    of_filled = proving.filled

    def filled(fitted: Any, memory: Any, options: Any, cutoff: float = math.inf, **given: Any) -> Any:
        cutoffs.append(cutoff)
        return of_filled(fitted, memory, options, cutoff, **given)

    monkeypatch.setattr(proving, "filled", filled)
    known = search.closer(limits, cutoff=0.9 * first.step_seconds)
    assert cutoffs == [0.9 * first.step_seconds]
    assert known
    assert known.step_seconds <= first.step_seconds


def test_a_plan_says_that_a_time_limit_ended_its_search():
    """The plan that is left in no time is a hand-made one, which that search did not find."""
    matrix = jax.ShapeDtypeStruct((256, 256), "float32")
    traced = trace(jax.grad(lambda w, x: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)), ((matrix, matrix), matrix), {})
    search = MeshSearch(
        planner="auto",
        problems=MeshProblems(step=Step(graph=traced.graph)),
        options=SolverOptions(time_limit=0.0),
        hand_made_plans=restrictions.hand_made_plans,
    )
    search.over([named(parse_cluster("8:a100-80g"), ("x", 8))])
    assert search.cheapest.solution.status == "time limit"
