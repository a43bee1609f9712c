"""Work that lets what computes steps go first on the host's processors."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_BEGUN: set[Future[None]] = set()
"""The saves that nobody has awaited yet."""


def begun(work: Callable[..., None], *args: Any) -> Future[None]:
    """Work of these arguments that has begun, or waits for what was given before; for `awaited`."""
    future = _background().submit(work, *args)
    _BEGUN.add(future)
    return future


def awaited(work: Future[None]) -> BaseException | None:
    """The error with which work ended, once it has; None where there is none."""
    error = work.exception()
    _BEGUN.discard(work)
    return error


@functools.cache
def _background() -> ThreadPoolExecutor:
    """The one thread that runs where no other one wants to, as do those it starts; work is done in order.

    On Linux its policy is SCHED_IDLE: with the least priority of the usual one it made steps beside it 3 % longer
    (`benchmarks.saving`). Where nothing is ever idle the next save waits for it, and while it waits no step runs.

    What it has been given is done before the program ends, and errors that nobody has awaited are printed. `atexit`
    would be too late for that: by then Python lets no library start threads, and Orbax does.
    """
    executor = ThreadPoolExecutor(1, "autopar background", _give_way)
    threading._register_atexit(_end, executor)  # pyright: ignore
    return executor


def _end(executor: ThreadPoolExecutor) -> None:
    executor.shutdown()
    for work in _BEGUN:
        if error := work.exception():
            sys.stderr.write(f"autopar: {error}\n")


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere a priority is a process's
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
