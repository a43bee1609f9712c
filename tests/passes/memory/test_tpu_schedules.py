"""The order of kernels on TPUs: what waits for most gathers runs last, and gathers run while kernels do."""

from __future__ import annotations

from functools import partial

import pytest

from passes.cluster import DeviceSpec, parse_cluster
from passes.memory.gpu_tasks import Role, tasks_of
from passes.memory.moments import Cost
from passes.memory.operations import Operation
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_schedules import Hiding, deepest_last, depths, schedule, seconds
from passes.memory.xla_tpu import HIDING, model
from tests.passes.memory.device_programs import TABLE, drawn, operation, program

GATHER = ("all_gather", ("x",))
LOSS, GRADIENT = 4, 8
SEEDS = range(20)

HIDDEN = Hiding(lambda kernels, _: Cost(computing=float(len(kernels[0].reads) > 0)), bytes_per_second=2.0**40)
"""Kernels that take a second, and gathers that take no time."""


def step() -> tuple[Operation, ...]:
    """A step that gathers weights, and the gradient of large logits, of which a loss is summed."""
    return (
        operation("input", shape=TABLE, tag=0),
        operation("collective", 0, shape=TABLE, tag=GATHER),
        operation("dot", 0, 1, shape=TABLE, name="logits"),
        operation("opaque", 2, shape=TABLE, name="terms"),
        operation("reduce", 3, name="reduce-sum"),
        operation("dot", 2, 0, name="slope"),
        operation("collective", 5, shape=TABLE, tag=GATHER),
        operation("dot", 6, 2, shape=TABLE, name="back"),
        operation("dot", 7, 1, shape=TABLE, name="gradient"),
    )


def test_the_loss_runs_as_soon_as_its_pass_is_through() -> None:
    described = program(list(step()), (GRADIENT, LOSS))
    kernels = fuse(described.operations, described.outputs)
    hidden, least = (schedule(described, kernels, hiding=hiding) for hiding in (HIDDEN, None))
    assert hidden.index(LOSS) < hidden.index(7)
    assert least.index(7) < least.index(LOSS)
    tasks = tasks_of(described, kernels)
    depth = depths(described, tasks)
    ran = {o: depth[task] for task, o in enumerate(tasks.operations) if tasks.roles[task] == Role.RUN}
    assert (ran[LOSS], ran[GRADIENT]) == (step()[1].nbytes, 2 * step()[1].nbytes)


def test_only_some_tpus_gather_while_kernels_run() -> None:
    devices = {name: parse_cluster(f"8:{name}").group().device for name in ("tpu-v5e", "tpu-v6e", "tpu-v5p")}
    hiding = {name for name, device in devices.items() if _schedule_of(device).keywords["hiding"]}
    assert hiding == HIDING.keys()


def _schedule_of(device: DeviceSpec) -> partial[list[int]]:
    """The schedule that the model of a device's compiler has."""
    (compiler,) = model(device).args
    return compiler.schedule


@pytest.mark.parametrize("seed", SEEDS)
def test_without_gathers_an_order_stays(seed: int) -> None:
    described = drawn(seed)
    kernels = fuse(described.operations, described.outputs)
    tasks = tasks_of(described, kernels)
    assert schedule(described, kernels, hiding=HIDDEN) == schedule(described, kernels)
    order = list(range(len(tasks)))
    assert deepest_last(described, tasks, order, seconds(described, tasks, kernels, HIDDEN)) == order


@pytest.mark.parametrize("kernels_long", [1, 2, 5])
def test_a_gather_ends_where_it_is_read_and_begins_so_many_kernels_before(kernels_long: int) -> None:
    """As weights of a Wide-ResNet under ZeRO-3, of which none is gathered at the beginning of the step."""
    layers: list[Operation] = [operation("input", shape=TABLE, tag=0), operation("input", shape=TABLE, tag=1)]
    for _ in range(4):
        layers.append(operation("dot", len(layers) - 1, 0, shape=TABLE, tag=("merged", len(layers))))
    gathered = len(layers)
    layers.append(operation("collective", 1, shape=TABLE, tag=GATHER))
    layers.append(operation("dot", gathered - 1, gathered, shape=TABLE, tag=("merged", gathered)))
    described = program(layers, (gathered + 1,))
    kernels = fuse(described.operations, described.outputs)
    tasks = tasks_of(described, kernels)
    hiding = HIDDEN._replace(bytes_per_second=layers[gathered].nbytes / kernels_long)
    spent = seconds(described, tasks, kernels, hiding)
    order = deepest_last(described, tasks, list(range(len(tasks))), spent)
    at = {(tasks.operations[task], tasks.roles[task]): order.index(task) for task in order}
    reader, end = at[gathered + 1, Role.RUN], at[gathered, Role.END]
    assert not any(spent[task] for task in order[end + 1 : reader])
    between = [task for task in order[at[gathered, Role.START] : end] if tasks.roles[task] == Role.RUN]
    assert sum(spent[task] for task in between) == min(kernels_long, 4)
