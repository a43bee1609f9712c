"""The options of `parallelize`, checked one by one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.errors import ArgumentError, explain
from autopar.jax_compat import Device
from passes.cluster import Cluster, parse_cluster
from passes.errors import ClusterError
from passes.planners import Planner
from passes.text import parse_nbytes
from passes.transforms import Coupling


def checked_cluster(cluster: object) -> Cluster | None:
    """The cluster that is meant. Raises ClusterError."""
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, str | os.PathLike):
        return parse_cluster(cluster)
    remedy = "write, say, cluster='8:h100', or devices=jax.devices()[:8] for devices that are here"
    rule = "a cluster is a description, a JSON file or an autopar.Cluster"
    raise ClusterError(explain(f"cluster={cluster!r:.60}", rule, "", remedy))


def checked_planner(planner: Any) -> Planner:
    """The planner. Raises ArgumentError for anything else, a planner's class included."""
    if not isinstance(planner, type) and callable(getattr(planner, "plan", None)):
        return planner
    is_class = isinstance(planner, type)
    rule = "a planner is a value, and this is its class" if is_class else "a planner has a method plan(graph, cluster)"
    remedy = "pass autopar.Auto(), DataParallel(), Zero(), Megatron(data=, tensor=) or Manual(path)"
    raise ArgumentError(explain(f"planner={planner!r:.60}", rule, "", remedy))


def checked_microbatches(microbatches: Any) -> int | None:
    """How many microbatches, None if that is not said. Raises ArgumentError."""
    if microbatches is None or (type(microbatches) is int and microbatches >= 1):
        return microbatches
    rule = "the batch is computed in a whole number of microbatches, 1 or more"
    raise ArgumentError(explain(f"microbatches={microbatches!r:.60}", rule, "", "leave it out for 1"))


def checked_progress(progress: Any) -> Any:
    """What hears of progress. Raises ArgumentError for what cannot be called."""
    if callable(progress):
        return progress
    rule = "progress is a function of one autopar.Progress"
    raise ArgumentError(explain(f"progress={progress!r:.60}", rule, "", "write, say, progress=print"))


def checked_limit(limit: Any) -> int | None:
    """The bytes that a device may hold. Raises ArgumentError."""
    if limit is None:
        return None
    nbytes = parse_nbytes(limit) if isinstance(limit, str) else limit
    if isinstance(nbytes, int | float) and not isinstance(nbytes, bool) and nbytes > 0:
        return int(nbytes)
    rule = "a limit is a number of bytes above 0, or words such as '12 GiB'"
    raise ArgumentError(explain(f"memory_limit={limit!r:.60}", rule, "", "leave it out for the device's own memory"))


def checked_coupling(coupling: Any) -> Coupling:
    """What a microbatch may differ in. Raises ArgumentError."""
    if coupling not in ("exact", "independent"):
        rule = 'it is "exact" or "independent"'
        raise ArgumentError(explain(f"microbatch_semantics={coupling!r:.60}", rule, "", 'leave it out for "exact"'))
    return coupling


def checked_devices(devices: Any) -> tuple[Device, ...]:
    """The devices. Raises ArgumentError for anything that is no sequence of them."""
    found = tuple(devices) if isinstance(devices, Sequence | np.ndarray) and not isinstance(devices, str) else None
    if found and all(hasattr(device, "device_kind") for device in found):
        return found
    rule = "devices are a sequence of one jax.Device or more"
    raise ArgumentError(explain(f"devices={devices!r:.60}", rule, "", "write, say, devices=jax.devices()[:8]"))
