"""The cluster of an accelerator that need not be here, with rates of computing that are its compiler's.

The products and copies that `measurement` times are compiled, and the same numbers of a device fitted to what the
compiler estimates of each. Links, collectives and overlap, which no compiler estimates, are the table's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.tools import device_sweep
from autopar.tools.device_sweep import Case, Sample
from autopar.tools.estimates import Estimate, estimate
from autopar.tools.topologies import cores_of, topology
from passes.cluster import Cluster, host_spec, parse_cluster
from passes.errors import ClusterError, explain
from passes.plan import Plan

Estimator = Callable[[Case, Plan], Estimate]
"""The estimate for a case, of which the plan on one device is given."""

Progress = Callable[[str], None]

_TARGET = re.compile(r"(?P<platform>gpu|tpu):(?P<name>[^:]+)(?::(?P<extents>\d+(?:x\d+)*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """The bytes of one operation, predicted and by the compiler's `memory_analysis()`; its `kind` and `size`."""

    kind: str
    size: str
    predicted: int
    compiled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerMeasurement:
    """The cluster, how well it explains the compiler's estimates, and bytes beside the compiler's.

    `preset` is the cluster of the table that it began with; its curve of small products is kept unless the estimates
    gave one (`has_curve`).
    """

    cluster: Cluster
    preset: Cluster
    samples: tuple[Sample, ...]
    nbytes: tuple[Bytes, ...]
    has_curve: bool


def target_cluster(target: str) -> Cluster:
    """The cluster of `tpu:v5e:2x4` (chips along each axis of the torus), `gpu:h100` (one host) or `2x8:h100`.

    Raises ClusterError for what it cannot read.
    """
    match = _TARGET.fullmatch(target)
    if not match:
        return parse_cluster(target)
    platform, extents = match["platform"], match["extents"]
    if platform == "gpu":
        if extents:
            remedy = f"write {extents}:{match['name']}"
            raise ClusterError(explain(f"target {target!r}", "a GPU has no torus of chips", "", remedy))
        return host_spec(match["name"]).cluster(1)
    name = match["name"] if match["name"].startswith("tpu-") else f"tpu-{match['name'].removeprefix('tpu')}"
    host = host_spec(name)
    if not extents:
        return host.cluster(1)
    devices = math.prod(map(int, extents.split("x"))) * cores_of(name)
    hosts, rest = divmod(devices, host.devices_per_host)
    if not devices or (hosts and rest):
        rule = f"hosts have {host.devices_per_host} devices each, and these are {devices}"
        raise ClusterError(explain(f"target {target!r}", rule, "", "write, say, tpu:v5e:2x4"))
    return host.cluster(hosts) if hosts else host.cluster(1, devices)


def compiler_measurement(preset: Cluster, *, announce: Progress = lambda what: None) -> CompilerMeasurement:
    """The measurement of a cluster of one kind of accelerator by its compiler, in about half a minute.

    Raises DeviceError where that compiler is not installed, or has no estimates for such a device.
    """
    device = topology(host_spec(preset.group().device.name).cluster(1))[0]

    def estimated(case: Case, plan: Plan) -> Estimate:
        announce(f"{case.kind} of {case.size}")
        return estimate(case.applied, case.shapes, case.dtype, device, plan)

    return fitted(preset, estimated)


def fitted(preset: Cluster, estimated: Estimator) -> CompilerMeasurement:
    """The measurement of a preset cluster whose device takes what `estimated` says of each case.

    The least of a kernel is the compiler's for the smallest product, on TPUs; GPUs' compiler leaves out what it takes
    to begin one, so there the device that is kept has the preset's, and samples are predicted without. An estimate
    below what the data sheet's memory alone takes is shown, but not fitted: the compiler left out the memory. Where the
    best curve is the steepest that is tried, the estimates do not determine one: the preset's is kept.
    """
    group = preset.group()
    several = tuple(device_sweep.cases(""))
    every = (*several, device_sweep.TINY_CASE)
    plans = {id(case): device_sweep.single_plan(case.step(), preset) for case in every}
    estimates = {id(case): estimated(case, plans[id(case)]) for case in every}
    floor = estimates[id(device_sweep.TINY_CASE)].seconds

    def seconds(case: Case) -> float:
        return estimates[id(case)].seconds

    def is_possible(case: Case, seconds: float) -> bool:
        return seconds >= case.least_nbytes / group.device.memory_bytes_per_second

    half = device_sweep.half_of(group.device)
    device, samples = device_sweep.fitted_device(group, preset, several, seconds, floor, is_possible)
    is_steepest = getattr(device, half) == device_sweep.HALVES[-1]
    if is_steepest:
        halves = (getattr(group.device, half),)
        device, samples = device_sweep.fitted_device(group, preset, several, seconds, floor, is_possible, halves)
    kept = replace(
        device,
        launch_seconds=max(floor, group.device.launch_seconds) if device.cores else floor,
        source=f"compute by the estimates of XLA's compiler, the rest as before: {group.device.source}",
    )
    cluster = replace(preset, name=f"{preset.name}, by its compiler", groups=(replace(group, device=kept),))
    nbytes = tuple(
        Bytes(
            kind=case.kind,
            size=case.size,
            predicted=plans[id(case)].peak_nbytes,
            compiled=estimates[id(case)].nbytes,
        )
        for case in several
    )
    return CompilerMeasurement(
        cluster=cluster, preset=preset, samples=samples, nbytes=nbytes, has_curve=not is_steepest
    )
