"""JAX's coordination service in a process of its own, beside the first process.

Inside the first process, its end would end all others before they can tell why.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

_SERVICE = """
import os, signal, sys, time
from jaxlib import _jax

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
address, count, heartbeat, shutdown, linger = sys.argv[1], *map(int, sys.argv[2:])
service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=heartbeat, shutdown_timeout=shutdown)
print(flush=True)
if not os.read(0, 1):
    time.sleep(linger)
service.shutdown()
"""
"""The script of the coordination service. It ends when something is written to its input, or a while after the process
that started it.
"""


class Service:
    """The coordination service, as JAX holds one; it outlives the process that started it by `linger_seconds`.

    Raises RuntimeError where it does not start.
    """

    def __init__(self, linger_seconds: int, address: str, count: int, **timeouts: Any) -> None:
        numbers = [count, timeouts["heartbeat_timeout"], timeouts["shutdown_timeout"], linger_seconds]
        command = [sys.executable, "-c", _SERVICE, address, *map(str, numbers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the coordination service does not start at {address}")

    def shutdown(self) -> None:
        self._process.communicate(b"\n")
