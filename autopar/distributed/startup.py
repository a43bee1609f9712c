"""The start of a process that is one of many: JAX's own runtime, joined once."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from autopar.errors import ArgumentError, DeviceError, explain

HEARTBEAT_SECONDS = 30
"""Seconds without a sign of life after which a process counts as dead: JAX waits 100, in which all others are idle."""

SHUTDOWN_SECONDS = 30
"""Seconds that a process which has finished waits for the others: JAX waits 300, also for one that has failed."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout_seconds: int = HEARTBEAT_SECONDS,
    shutdown_timeout_seconds: int = SHUTDOWN_SECONDS,
) -> None:
    """Nothing; JAX's runtime of many processes is joined, by `jax.distributed.initialize` with these options.

    Under Slurm, Open MPI, Kubernetes (JobSet) and on TPUs they may all be left out. Under `autopar launch` the process
    has joined before the script begins, and this returns at once. It comes before all that asks JAX for devices.

    Raises DeviceError where no launcher is detected and the first three are not given, or where JAX has started
    already, and ArgumentError for other numbers than those that the process has joined with.
    """
    if jax.distributed.is_initialized():
        _check_joined(num_processes, process_id)
        return
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids=local_device_ids,
            cluster_detection_method=cluster_detection_method,
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            shutdown_timeout_seconds=shutdown_timeout_seconds,
        )
    except (ValueError, RuntimeError) as error:
        remedy = (
            "start the script with `autopar launch --processes 4 script.py`, Slurm, Open MPI or a JobSet, or pass "
            "coordinator_address, num_processes and process_id; call it before anything that asks JAX for devices"
        )
        rule = f"the process cannot join the others: {error}"
        raise DeviceError(explain("autopar.distributed.initialize()", rule, "", remedy)) from error


def _check_joined(num_processes: int | None, process_id: int | None) -> None:
    """Raises ArgumentError for other numbers than those of the process."""
    given = {"num_processes": num_processes, "process_id": process_id}
    present = {"num_processes": jax.process_count(), "process_id": jax.process_index()}
    for name, value in given.items():
        if value is not None and value != present[name]:
            rule = f"the process has joined already, with {name}={present[name]}"
            remedy = "leave it out where a launcher starts the processes"
            raise ArgumentError(explain(f"initialize({name}={value})", rule, "", remedy))
