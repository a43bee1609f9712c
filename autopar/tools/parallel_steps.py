"""The times that collectives take in whole training steps, compared with those between two products.

Devices that share cores are threads, and a collective is where they meet. Between two small products they come to it at
about the same moment; in a training step each comes when its own operators are done, and cores stand idle until the
last one has come and the others are awake again. No chain of collectives shows that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import jax

from autopar.api import parallelize
from autopar.jax_compat import Device
from autopar.tools import whole_steps
from autopar.tools.device_sweep import Sample, single_plan
from autopar.tools.whole_steps import Call, WholeStep
from passes.cluster import CPU, Cluster, Mesh
from passes.plan import Plan
from passes.planners import DataParallel, PlanOptions

KIND = "training steps, data parallel"

WARM, PAIRS = 4, 24
"""Steps before any is timed, and pairs of steps, alone and data parallel, of which the medians count: a second in all
on 8 devices of 2 cores; `python -m benchmarks.between_products` measures twice."""

Pair = tuple[float, float]


def with_waits(cluster: Cluster, mesh: Mesh, devices: Sequence[Device]) -> tuple[Cluster, tuple[Sample, ...]]:
    """The cluster whose shortest collectives take what data-parallel trainings say, and its prediction for each.

    A data-parallel step takes longer than one that every device takes by itself. One factor for collectives of no bytes
    explains by how much, in the mean of networks on images, whose norms have many short sums among the devices; where
    devices do not share cores it is 1.
    """
    if len(devices) == 1 or cluster.group().device.name != CPU:
        return cluster, ()
    trainings = whole_steps.convolutional_nets("cpu")
    spent = [seconds(training, mesh, devices) for training in trainings]
    alone = [single_plan(training.traced(), cluster).step_seconds for training in trainings]
    factors: list[float] = []
    for training, (apart, together), predicted in zip(trainings, spent, alone, strict=True):
        once, twice = (predicted_seconds(training, lengthened(cluster, factor)) for factor in (1.0, 2.0))
        if twice > once:  # unless bytes bound every collective as it was measured
            factors.append(1.0 + (together - apart - (once - predicted)) / (twice - once))
    result = lengthened(cluster, max(1.0, statistics.fmean(factors or [1.0])))
    samples = (
        Sample(kind=KIND, size=training.size, predicted=predicted_seconds(training, result), measured=together)
        for training, (_, together) in zip(trainings, spent, strict=True)
    )
    return result, tuple(samples)


def lengthened(cluster: Cluster, factor: float) -> Cluster:
    """The cluster whose measured collectives of no bytes take so many times as long."""
    group = cluster.group()
    measured = tuple(replace(line, alpha_seconds=line.alpha_seconds * factor) for line in group.measured)
    return replace(cluster, groups=(replace(group, measured=measured),))


def predicted_seconds(training: WholeStep, cluster: Cluster) -> float:
    """The seconds of a data-parallel step, in which every device has the training's batch."""
    return planned(training, cluster).step_seconds


def planned(training: WholeStep, cluster: Cluster) -> Plan:
    """The plan of a data-parallel step, in which every device has the training's batch."""
    step = _everywhere(training, cluster).traced()
    return cast("Plan", DataParallel().plan(step, cluster, PlanOptions()).plan)


def seconds(training: WholeStep, mesh: Mesh, devices: Sequence[Device]) -> Pair:
    """Median seconds of a training's step on every device by itself, and of the data-parallel step of all of them."""
    calls = whole_steps.alone(training, mesh, devices), together(training, mesh.cluster, devices)
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM + PAIRS):
        for call, each in zip(calls, spent, strict=True):
            start = time.perf_counter()
            call()
            each.append(time.perf_counter() - start)
    apart, joined = (statistics.median(each[WARM:]) for each in spent)
    return apart, joined


def together(training: WholeStep, cluster: Cluster, devices: Sequence[Device]) -> Call:
    """A function that takes one data-parallel step on all devices, and waits for it."""
    everywhere = _everywhere(training, cluster)
    step = parallelize(everywhere.step, cluster=cluster, devices=devices, planner=DataParallel(), donate_argnums=(0, 1))
    given = everywhere.drawn()
    compiled = step.lower(*given).compile()
    weights, moments, batch = jax.device_put(given, compiled.input_shardings[0])
    state = [weights, moments]

    def call() -> None:
        *state[:], loss = compiled(*state, batch)
        loss.block_until_ready()

    return call


def _everywhere(training: WholeStep, cluster: Cluster) -> WholeStep:
    """The training with as many times its batch as the cluster has devices."""
    return replace(training, batch=training.batch * cluster.n_devices)
