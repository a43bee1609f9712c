"""Operator groups around small values: two batches that share a scale are placed each by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.frontend.tracing import trace
from passes.placement import group
from passes.placement.operator_group import OperatorGroup, has_other_rows

ROWS, WIDTH = 65536, 256


def towers(scale: jax.Array, weight: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Two batches by one scale that is computed, each through the same weight."""
    scale = jnp.exp(scale)
    return (jnp.tanh((x * scale) @ weight) + jnp.tanh((y * scale) @ weight)).sum(-1)


def many_towers(scale: jax.Array, weight: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    def body(total: jax.Array, time: jax.Array) -> tuple[jax.Array, None]:
        return total + towers(scale * time, weight, x, y), None

    return jax.lax.scan(body, jnp.zeros(x.shape[0]), jnp.arange(4.0))[0]


def arguments() -> tuple[Any, ...]:
    shapes = (WIDTH,), (WIDTH, 64), (ROWS, WIDTH), (ROWS, WIDTH)
    return tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Auto()])
@pytest.mark.parametrize("step", [towers, many_towers])
def test_two_batches_are_both_cut_where_they_share_a_scale(step: Any, planner: Any):
    """One was whole on every device, as an axis can cut one class of a group, and their rows were two of one group."""
    planned = autopar.parallelize(step, planner=planner, cluster="8:a100-80g", batch_argnums=(2, 3))
    plan = planned.plan(*arguments())
    (axis,) = plan.mesh.axes
    assert [spec.dims[0] for spec in plan.inputs[2:]] == [(axis,), (axis,)]
    assert not plan.collectives


def test_the_mean_that_centres_a_weight_is_grouped_with_it():
    """A mean is small and computed, but of the weight itself: both are cut alike."""

    def step(weight: jax.Array, x: jax.Array) -> jax.Array:
        return x @ (weight - weight.mean(0))

    graph = trace(step, (jnp.ones((16, 8)), jnp.ones((4, 16))), {}).graph
    light = [each for each in group(graph).operator_groups if each.light]
    assert len(light) == 1


def test_a_gradient_by_one_batch_that_goes_on_to_another_is_reduced_between_them():
    """Examples are weighed by how a step on them would change the loss of others (Ren et al. 2018): what the gradient
    of a bias is made of was gathered, as its rows and those that it is repeated for were placed as one.
    """

    def step(bias: jax.Array, weight: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        def losses(bias: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(x @ weight + bias) ** 2, 1)

        def after(shares: jax.Array) -> jax.Array:
            return losses(bias - jax.grad(lambda b: shares @ losses(b, x))(bias), y).mean()

        return jax.grad(after)(jnp.zeros(len(x)))

    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1024,), (256, 1024), (4096, 256), (4096, 256))]
    plan = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g", batch_argnums=(2, 3)).plan(
        *types
    )
    assert {(c.kind, c.nbytes) for c in plan.collectives} == {("all_reduce", 1024 * 4)}


@pytest.mark.parametrize(("rows_of", "are_other"), [(0, False), (1, True)])
def test_rows_that_a_sum_is_repeated_for_are_of_the_batch_that_was_summed_or_another(rows_of: int, are_other: bool):
    """Group 2 sums value 0, of the rows of group 0, and repeats the sum as value 1; value 2 has rows of some group."""
    batches = [OperatorGroup(phase="forward", light=False, value_classes={v: [0]}) for v in (0, 2)]
    for batch in batches:
        batch.new_class()
    sums = OperatorGroup(phase="backward", light=True, value_classes={0: [0], 1: [1]}, origins={0: (0, 0)})
    sums.new_class(), sums.new_class()
    batches[rows_of].value_classes[2] = [0]
    groups = [*batches, sums]
    assert has_other_rows([1, 2], sums, {1: 2, 2: rows_of}, groups) == are_other
