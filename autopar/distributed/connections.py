"""Connections to other processes, over which arrays of single devices are sent.

The receiver fetches: both sides return at once, in whichever order they come, and the contents follow when they are
computed. Small arrays go over JAX's own transfer server, and whoever reads them on the device waits for their contents;
large ones go over plain sockets, which have two to four times its bandwidth, and are waited for in Python. Each of two
processes numbers the transfers between them in its own order; the caller sees to it that these orders agree. An array
that was sent is read when the receiver asks for it, so it must neither be donated nor deleted before; references to it
may be dropped.
"""

from __future__ import annotations

import functools
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer

from autopar import jax_compat
from autopar.distributed.agreement import Processes
from autopar.distributed.streams import Streams

LARGE_NBYTES = 1 << 21
"""Bytes sent from process to process at once from which bandwidth counts for more than not waiting."""

_RECEIVER_BITS = 40
"""Bits of a transfer's number that count transfers; those above them are the receiver's rank."""

_STREAMS = 2
"""Connections that one array may be sent over at once."""


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of this process: a server, what it has sent and received, and the servers of others."""

    processes: Processes
    server: Any
    streams: Streams
    clients: dict[int, Any] = field(default_factory=dict)
    numbers: Counter[tuple[int, int]] = field(default_factory=Counter)

    @classmethod
    def of(cls, processes: Processes) -> Connections:
        """The one value of the connections of these processes, whose transfers are numbered."""
        return _connections(processes.rank, processes.client)

    def send(self, receiver: int, arrays: Sequence[jax.Array]) -> None:
        """Makes arrays of single devices ready for another process to fetch."""
        self.server.await_pull(self._number(self.processes.rank, receiver), list(arrays))

    def receive(self, sender: int, structs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """The arrays that another process sends next, on single devices of this process; they may not have
        arrived yet.
        """
        if sender not in self.clients:
            self.clients[sender] = self.server.connect(self.processes.shared(f"server/{sender}", sender))
        return self.clients[sender].pull(self._number(sender, self.processes.rank), list(structs))

    def send_large(self, receiver: int, arrays: Sequence[jax.Array]) -> None:
        """Sends arrays of single devices to a process that waits for them in `receive_large`."""
        self.streams.send(receiver, arrays)

    def receive_large(self, sender: int, structs: Sequence[jax.ShapeDtypeStruct]) -> Future[list[np.ndarray]]:
        """The contents of the arrays that another process sends next by `send_large`, once they have arrived."""
        return self.streams.receive(sender, structs)

    def _number(self, sender: int, receiver: int) -> int:
        self.numbers[sender, receiver] += 1
        return (receiver << _RECEIVER_BITS) + self.numbers[sender, receiver]


@functools.cache
def _connections(rank: int, client: Any) -> Connections:
    address = _own_address()
    host = f"[{address}]" if ":" in address else address
    server = transfer.start_transfer_server(
        jax.local_devices()[0].client, address=f"{host}:0", transport_addresses=[f"{host}:0"] * _STREAMS
    )
    processes = Processes((rank,), rank, client)
    processes.share(f"server/{rank}", server.address())
    return Connections(processes, server, Streams(processes, address))


def _own_address() -> str:
    """The address of this host on the network over which it reaches the first process."""
    first, *_ = socket.getaddrinfo(jax_compat.coordinator_host(), 9, type=socket.SOCK_DGRAM)
    with socket.socket(first[0], first[1]) as probe:
        probe.connect(first[4])  # sends nothing: a datagram socket learns its own address
        return probe.getsockname()[0]
