"""Work that lets what computes steps go first on the host's processors."""

from __future__ import annotations

import functools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_LEAST_PRIORITY = 19
"""The nice value of a thread that runs where no other one wants to, on Linux."""


@functools.cache
def background() -> ThreadPoolExecutor:
    """The one thread of low priority, as are those it starts; work is done in the order in which it is submitted.

    What it has been given is done before the program ends. `atexit` would be too late for that: by then Python lets no
    library start threads, and Orbax does.
    """
    executor = ThreadPoolExecutor(1, "autopar background", _give_way)
    threading._register_atexit(executor.shutdown)  # pyright: ignore
    return executor


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere a priority is a process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
