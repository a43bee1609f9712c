"""The start of a process that is one of many: JAX's own runtime, joined once."""

from __future__ import annotations

import functools
import math
import socket
from collections.abc import Sequence
from typing import Any

import jax

from autopar import jax_compat
from autopar.distributed.agreement import everyone
from autopar.distributed.service import Service
from autopar.distributed.watch import Watch
from autopar.errors import ArgumentError, DeviceError, explain

LOST_SECONDS = 15.0
"""Seconds without a sign of life after which a process counts as gone."""

STALL_SECONDS = 1800.0
"""Seconds for which a process may be a step behind before it counts as hung; the first one may evaluate alone, or write
files.
"""

HEARTBEAT_SECONDS = 60
"""JAX's own such time, after which it ends all processes without naming one; longer than ours, so that they
are named.
"""

SHUTDOWN_SECONDS = int(STALL_SECONDS)
"""Seconds that a process which has finished waits for the others; one that is lost or has failed is named
long before.
"""


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
    lost_seconds: float = LOST_SECONDS,
    stall_seconds: float = STALL_SECONDS,
) -> None:
    """Joins JAX's runtime of many processes, by `jax.distributed.initialize` with these options.

    All of them may be left out under Slurm, Open MPI, Kubernetes (JobSet) and on TPUs. Under `autopar launch` the
    process has joined before the script begins, and this returns at once. Call it before anything that asks JAX for
    devices.

    From then on the processes watch each other. When one fails, gives no sign of life for `lost_seconds`, has ended a
    step that long before the others, or is a step behind for `stall_seconds`, every other one prints its rank and host,
    and ends with status 75.

    Raises DeviceError where no launcher is detected and the first three options are not given, or where JAX has started
    already; ArgumentError for other numbers than those that the process has joined with, for an invalid address and for
    seconds that are not above 0.
    """
    for name, seconds in (("lost_seconds", lost_seconds), ("stall_seconds", stall_seconds)):
        if not 0 < seconds < math.inf:
            rule = "should be a number of seconds above 0"
            raise ArgumentError(explain(f"initialize({name}={seconds})", rule, "", "leave it out, or write, say, 30"))
    if coordinator_address is not None:
        _check_address(coordinator_address)
    if jax.distributed.is_initialized():
        _check_joined(num_processes, process_id)
        return
    try:
        with jax_compat.service_by(functools.partial(Service, int(3 * lost_seconds))):
            jax.distributed.initialize(
                coordinator_address,
                num_processes,
                process_id,
                local_device_ids=local_device_ids,
                cluster_detection_method=cluster_detection_method,
                initialization_timeout=initialization_timeout,
                heartbeat_timeout_seconds=max(heartbeat_timeout_seconds, int(4 * lost_seconds)),
                shutdown_timeout_seconds=shutdown_timeout_seconds,
            )
    except (ValueError, RuntimeError) as error:
        remedy = (
            "start the script with `autopar launch --processes 4 script.py`, Slurm, Open MPI or a JobSet, or pass "
            "coordinator_address, num_processes and process_id; call it before anything that asks JAX for devices"
        )
        rule = f"the process cannot join the others: {error}"
        raise DeviceError(explain("autopar.distributed.initialize()", rule, "", remedy)) from error
    _watch(lost_seconds, stall_seconds)


@functools.cache
def _watch(lost_seconds: float, stall_seconds: float) -> Watch | None:
    """The watch of this process over the others, which has begun; None if there are none."""
    processes = everyone()
    if processes is None:
        return None
    hosts = processes.gather("their hosts", socket.gethostname())
    watch = Watch(processes, hosts, lost_seconds, stall_seconds)
    watch.start()
    return watch


def _check_address(address: Any) -> None:
    """Raises ArgumentError unless it is HOST:PORT: JAX would wait there for the others, and then end the process."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        rule = "should be the first process's host and a port from 1 to 65535"
        remedy = "write, say, coordinator_address='10.0.0.1:1234'"
        raise ArgumentError(explain(f"initialize(coordinator_address={address!r:.60})", rule, "", remedy))


def _check_joined(num_processes: int | None, process_id: int | None) -> None:
    """Raises ArgumentError for other numbers than those of the process."""
    given = {"num_processes": num_processes, "process_id": process_id}
    present = {"num_processes": jax.process_count(), "process_id": jax.process_index()}
    for name, value in given.items():
        if value is not None and value != present[name]:
            rule = f"the process has joined already, with {name}={present[name]}"
            remedy = "leave it out where a launcher starts the processes"
            raise ArgumentError(explain(f"initialize({name}={value})", rule, "", remedy))
