"""The order of kernels on TPUs: what waits for most gathers runs last."""

from __future__ import annotations

from functools import partial

import pytest

from passes.cluster import DeviceSpec, parse_cluster
from passes.memory.gpu_tasks import Role, tasks_of
from passes.memory.operations import Operation
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_schedules import deepest_last, depths, schedule
from passes.memory.xla_tpu import HIDING, model
from tests.passes.memory.device_programs import TABLE, drawn, operation, program

GATHER = ("all_gather", ("x",))
LOSS, GRADIENT = 4, 8
SEEDS = range(20)


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
    hidden, least = (schedule(described, kernels, hides=hides) for hides in (True, False))
    assert hidden.index(LOSS) < hidden.index(7)
    assert least.index(7) < least.index(LOSS)
    tasks = tasks_of(described, kernels)
    depth = depths(described, tasks)
    ran = {o: depth[task] for task, o in enumerate(tasks.operations) if tasks.roles[task] == Role.RUN}
    assert (ran[LOSS], ran[GRADIENT]) == (step()[1].nbytes, 2 * step()[1].nbytes)


def test_only_some_tpus_gather_while_kernels_run() -> None:
    devices = {name: parse_cluster(f"8:{name}").group().device for name in ("tpu-v5e", "tpu-v6e", "tpu-v5p")}
    hiding = {name for name, device in devices.items() if _schedule_of(device).keywords["hides"]}
    assert hiding == HIDING


def _schedule_of(device: DeviceSpec) -> partial[list[int]]:
    """The schedule that the model of a device's compiler has."""
    (compiler,) = model(device).args
    return compiler.schedule


@pytest.mark.parametrize("seed", SEEDS)
def test_without_gathers_an_order_stays(seed: int) -> None:
    described = drawn(seed)
    kernels = fuse(described.operations, described.outputs)
    tasks = tasks_of(described, kernels)
    assert schedule(described, kernels) == schedule(described, kernels, hides=False)
    order = list(range(len(tasks)))
    assert deepest_last(described, tasks, order) == order
