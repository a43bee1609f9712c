"""The bandwidth of arrays between two processes beside that of a plain socket.

    autopar launch --processes 2 --devices-per-process 1 benchmarks/bandwidth.py

Prints a line for each size: bytes a second by the medians of round trips, which arrays and the socket make in turn, so
that what else the machine does falls on both. Bound: 70 % of the socket's bandwidth at 64 MiB, or exit status 1.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import autopar
from autopar.distributed import Processes, among, placed
from autopar.runtime.cross_process import transport_of
from autopar.runtime.transfer import arrived, compile_transfer
from autopar.runtime.transfer_plan import plan_transfer

SIZES = (1 << 20, 1 << 24, 1 << 26)
TRIES = 11
BOUND = 0.7
"""The share of a plain socket's bandwidth that transfers of the last size should have."""


def main() -> None:
    """Prints bytes a second between two processes, of arrays and of a socket; exits with a message below the bound."""
    autopar.distributed.initialize()
    processes = among(jax.devices())
    if processes is None:
        sys.exit("one process alone: run it by `autopar launch --processes 2 --devices-per-process 1`")
    peer = connected(processes)
    first, second = (next(d for d in jax.devices() if d.process_index == rank) for rank in (0, 1))
    ours = plain = 1.0
    for nbytes in SIZES:
        shape, forth, back = (nbytes // 4,), SingleDeviceSharding(first), SingleDeviceSharding(second)
        plans = [plan_transfer(shape, jnp.float32, *pair) for pair in ((forth, back), (back, forth))]
        there, again = (compile_transfer(plan, transport_of(plan, processes)) for plan in plans)
        array = placed(np.ones(shape, np.float32), forth)

        def transferred(array: jax.Array = array, there=there, again=again) -> None:
            jax.block_until_ready(arrived(again.run(arrived(there.run(array)))))

        buffer = memoryview(bytearray(nbytes))

        def copied(buffer: memoryview = buffer) -> None:
            if processes.leads:
                peer.sendall(buffer)
                receive(peer, buffer)
            else:
                receive(peer, buffer)
                peer.sendall(buffer)

        ours, plain = medians([transferred, copied], processes)
        if processes.leads:
            rates = f"{2e-9 * nbytes / ours:.2f} GB/s, socket {2e-9 * nbytes / plain:.2f} GB/s"
            print(f"{nbytes >> 20:4} MiB: {rates}, {100 * (plain / ours):.0f} %", flush=True)
    if processes.leads and plain / ours < BOUND:
        sys.exit(f"MISSED {100 * (plain / ours):.0f} % of the socket's bandwidth, bound {100 * BOUND:.0f} %")


def connected(processes: Processes) -> socket.socket:
    """A socket that is connected to the other process."""
    if processes.leads:
        with socket.create_server(("127.0.0.1", 0)) as server:
            processes.share("bandwidth", str(server.getsockname()[1]))
            return server.accept()[0]
    return socket.create_connection(("127.0.0.1", int(processes.shared("bandwidth", processes.ranks[0]))))


def receive(peer: socket.socket, buffer: memoryview) -> None:
    """Reads from the socket until the buffer is full."""
    at = 0
    while at < len(buffer):
        at += peer.recv_into(buffer[at:])


def medians(round_trips: Sequence[Callable[[], None]], processes: Processes) -> list[float]:
    """The median seconds of each of some round trips, which both processes make together and in turn."""
    seconds: list[list[float]] = [[] for _ in round_trips]
    for number in range(-1, TRIES):
        for round_trip, spent in zip(round_trips, seconds, strict=True):
            processes.gather("a round trip", "")
            start = time.perf_counter()
            round_trip()
            if number >= 0:
                spent.append(time.perf_counter() - start)
    return list(map(statistics.median, seconds))


if __name__ == "__main__":
    main()
