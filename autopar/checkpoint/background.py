"""Work that lets what computes steps go first on the host's processors."""

from __future__ import annotations

import functools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor


@functools.cache
def background() -> ThreadPoolExecutor:
    """The one thread that runs where no other one wants to, as do those it starts; work is done in order.

    On Linux its policy is SCHED_IDLE: with the least priority of the usual one it made steps beside it 3 % longer
    (`benchmarks.saving`). Where nothing is ever idle the next save waits for it, and while it waits no step runs.

    What it has been given is done before the program ends. `atexit` would be too late for that: by then Python lets no
    library start threads, and Orbax does.
    """
    executor = ThreadPoolExecutor(1, "autopar background", _give_way)
    threading._register_atexit(executor.shutdown)  # pyright: ignore
    return executor


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere a priority is a process's
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
