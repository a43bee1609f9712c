"""The copies of slices in loops over layers: which there are, what they take, and that a plan is charged for them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import DataParallel
from autopar.rewrite import step_of
from passes.cluster import Mesh, parse_cluster
from passes.intra_op.stacks import Copies, copies
from passes.placement import group

CLUSTER = "4:a100-80g"
LAYERS = 3
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, 64, 64), jnp.float32)
BATCH = jax.ShapeDtypeStruct((16, 64), jnp.float32)


def scanned(weights: Any, x: Any) -> Any:
    """Layers whose output goes on and is stacked as well, with squares and cosines that are stacked alone."""

    def layer(x: Any, w: Any) -> Any:
        h = jnp.sin(x @ w)
        return h, (h, jnp.square(x), x @ w)

    return jax.lax.scan(layer, x, weights)


def test_slices_are_copied_for_products_and_into_stacks_that_their_operator_does_not_write() -> None:
    traced = autopar.parallelize(scanned, cluster=CLUSTER).trace(WEIGHTS, BATCH)
    graph = step_of(traced, [WEIGHTS, BATCH]).graph
    grouping = group(graph)
    ((index, control),) = grouping.controls.items()
    found = copies(control, grouping.bodies[index])
    stacked = [use.port for use in control.results if use.stacked]
    sliced = [use.port for use in control.operands if use.stacked]
    goes_on, square, product = stacked
    assert {port for port, copied in found.items() if copied.slices} == {*sliced, goes_on, product}
    assert {port for port, copied in found.items() if copied.begun} == {goes_on, square, product}
    assert {number for copied in found.values() for number in (copied.slices, copied.begun)} == {0, LAYERS}


@pytest.mark.parametrize(("name", "passes"), [("a100-80g", 0), ("cpu", 2), ("tpu-v5e", 0)])
def test_a_copy_reads_and_writes_in_one_launch_and_a_stack_begins_with_zeros(name: str, passes: int) -> None:
    mesh = Mesh(axes=("x",), sizes=(4,), cluster=parse_cluster(f"4:{name}"))
    device, one = mesh.cluster.group().device, Copies(slices=1)
    assert one.seconds(0, mesh) == device.launch_seconds
    written = (1 << 30) / device.achieved_bytes_per_second
    assert one.seconds(1 << 30, mesh) - one.seconds(0, mesh) == pytest.approx(2 * written)
    assert Copies(begun=3).seconds(1 << 30, mesh) == pytest.approx(3 * passes * written)


def test_software_that_unrolls_loops_copies_nothing() -> None:
    cluster = parse_cluster("4:cpu")
    group_of_hosts = cluster.group()
    unrolled = replace(group_of_hosts, device=replace(group_of_hosts.device, unrolls=True))
    mesh = Mesh(axes=("x",), sizes=(4,), cluster=replace(cluster, groups=(unrolled,)))
    assert Copies(slices=1, begun=3).seconds(1 << 30, mesh) == 0


def train_step(weights: Any, x: Any) -> Any:
    """A step by SGD, over a stack of weights in a loop, or over several one after the other."""

    def loss(weights: Any) -> Any:
        if isinstance(weights, tuple):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.sum(y**2)
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def test_a_scanned_step_takes_longer_than_one_written_out() -> None:
    """Going forward it copies a weight and what is kept, going backward a weight, what was kept and a gradient."""
    layer, batch = jax.ShapeDtypeStruct((2048, 2048), jnp.float32), jax.ShapeDtypeStruct((64, 2048), jnp.float32)
    stack = jax.ShapeDtypeStruct((LAYERS, *layer.shape), jnp.float32)
    scan, written_out = (
        autopar.parallelize(train_step, cluster=CLUSTER, planner=DataParallel()).plan(weights, batch)
        for weights in (stack, (layer,) * LAYERS)
    )
    phases = ("forward", "backward")
    spent, less = (sum(plan.computing[phase] for phase in phases) for plan in (scan, written_out))
    weight = Copies(slices=1).seconds(2048 * 2048 * 4, scan.mesh)
    assert spent - less > 2.5 * LAYERS * weight


def test_an_edited_plan_is_charged_for_copies_too() -> None:
    given = jax.ShapeDtypeStruct((LAYERS, 64, 64), jnp.float32), BATCH
    plan = autopar.parallelize(train_step, cluster=CLUSTER, planner=DataParallel()).plan(*given)
    again = autopar.parallelize(train_step, cluster=CLUSTER, planner=autopar.Manual(plan)).plan(*given)
    assert again.computing == plan.computing
