"""Steps with recomputation: a plan takes the seconds that its answer has in the problem, for any answer."""

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.rewrite import step_of
from passes.cluster import Mesh, parse_cluster
from passes.intra_op import assemble
from passes.intra_op.extract import donations, extract_plan
from passes.memory import Memory, peak
from passes.placement import Layout, ReshardingPlan, group
from passes.sharding import Resharder
from passes.solver import SolverOptions, solve
from passes.step import Step, Variant
from tests.sample import slow

CLUSTER = "2x2:v100-16g"
ANSWERS, CHANGED = 30, (0.02, 0.1, 0.5)
"""Answers that are tried, and the share of the operators that are placed at random in one after the other."""


def train_step(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        y = x
        for inner, outer in weights:
            y = y + jnp.tanh(y @ inner) @ outer
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def residual(kept: str) -> Step:
    """A residual network of three blocks whose backward pass keeps so little of the forward one."""
    shapes = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((128, 64), jnp.float32)
    args = [shapes] * 3, jax.ShapeDtypeStruct((16, 8, 64), jnp.float32)
    traced = autopar.parallelize(train_step, cluster=CLUSTER, donate_argnums=0).trace(*args)
    step = step_of(traced, jax.tree.leaves(args))
    return step.variant(Variant(microbatches=1, kept=(kept,) * step.layers))


@pytest.mark.parametrize(
    ("kept", "regather"),
    [("matmuls", True), *(slow(*case) for case in (("inputs", False), ("inputs", True), ("matmuls", False)))],
)
def test_a_sum_that_is_read_on_both_sides_of_a_barrier_is_reduced_once(kept: str, regather: bool):
    """The cotangent of a block enters its recomputation through a barrier, and the block before it directly."""
    step, mesh = residual(kept), Mesh(axes=("x", "y"), sizes=(2, 2), cluster=parse_cluster(CLUSTER))
    resharder = Resharder(mesh)
    assembly = assemble(step.graph, mesh, group(step.graph), resharder, step.state_pairs, regather=regather)
    problem, dice = assembly.problem, random.Random(2)

    def memory_of(layout: Layout, reshardings: ReshardingPlan) -> Memory:
        donated = donations(step.graph, step.donated)
        return peak(step.graph, group(step.graph), mesh, layout, reshardings, step.state_pairs, donated)

    best = solve(problem, SolverOptions(gap=0.05), close=False)
    for number in range(ANSWERS):
        choice = list(best.choice)
        for node, seconds in enumerate(problem.seconds):
            if dice.random() < CHANGED[number % len(CHANGED)]:
                choice[node] = int(dice.choice(np.flatnonzero(np.isfinite(seconds)).tolist()))
        told = problem.evaluate(choice)
        answer = replace(best, choice=tuple(choice), objective=told)
        plan = extract_plan("", assembly, answer, resharder, memory_of, {})
        assert plan.step_seconds == pytest.approx(told, rel=1e-9)
