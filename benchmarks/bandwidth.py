"""`autopar launch --processes 2 --devices-per-process 1 benchmarks/bandwidth.py`: arrays between processes beside a
plain copy over a socket.

A line for each size, of the fastest of some tries. The machine has to be quiet.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import autopar
from autopar.distributed import Processes, among, placed
from autopar.runtime.cross_process import transport_of
from autopar.runtime.transfer import compile_transfer
from autopar.runtime.transfer_plan import plan_transfer

SIZES = (1 << 20, 1 << 24, 1 << 26)
TRIES = 7


def main() -> None:
    autopar.distributed.initialize()
    processes = among(jax.devices())
    assert processes is not None
    peer = connected(processes)
    first, second = (next(d for d in jax.devices() if d.process_index == rank) for rank in (0, 1))
    for nbytes in SIZES:
        shape, forth, back = (nbytes // 4,), SingleDeviceSharding(first), SingleDeviceSharding(second)
        plans = [plan_transfer(shape, jnp.float32, *pair) for pair in ((forth, back), (back, forth))]
        there, again = (compile_transfer(plan, transport_of(plan, processes)) for plan in plans)
        array = placed(np.ones(shape, np.float32), forth)

        def transferred(array: jax.Array = array, there=there, again=again) -> None:
            jax.block_until_ready(again.run(there.run(array)))

        buffer = memoryview(bytearray(nbytes))

        def copied(buffer: memoryview = buffer) -> None:
            if processes.leads:
                peer.sendall(buffer)
                receive(peer, buffer)
            else:
                receive(peer, buffer)
                peer.sendall(buffer)

        rates = [2 * nbytes / fastest(round_trip, processes) for round_trip in (transferred, copied)]
        if processes.leads:
            ours, plain = (rate / 1e9 for rate in rates)
            print(f"{nbytes >> 20:4} MiB: {ours:.2f} GB/s, socket {plain:.2f} GB/s, {ours / plain:.0%}", flush=True)


def connected(processes: Processes) -> socket.socket:
    """The other process, over a plain connection."""
    if processes.leads:
        with socket.create_server(("127.0.0.1", 0)) as server:
            processes.share("bandwidth", str(server.getsockname()[1]))
            return server.accept()[0]
    return socket.create_connection(("127.0.0.1", int(processes.shared("bandwidth", processes.ranks[0]))))


def receive(peer: socket.socket, buffer: memoryview) -> None:
    """Fills the buffer."""
    at = 0
    while at < len(buffer):
        at += peer.recv_into(buffer[at:])


def fastest(round_trip: Callable[[], None], processes: Processes) -> float:
    """Seconds of the fastest of some round trips that both processes make together."""
    seconds: list[float] = []
    for _ in range(TRIES):
        processes.gather("a round trip", "")
        start = time.perf_counter()
        round_trip()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
