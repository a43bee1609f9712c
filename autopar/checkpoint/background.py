"""Work that runs in the background with the lowest priority, so that steps are not slowed down."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

_BEGUN: set[Future[None]] = set()
"""The saves that nobody has awaited yet."""


def begun(work: Callable[..., None], *args: Any) -> Future[None]:
    """A future of `work(*args)`, which begins once earlier work is done; `awaited` waits for it."""
    future = _background().submit(work, *args)
    _BEGUN.add(future)
    return future


def awaited(work: Future[None]) -> BaseException | None:
    """The error with which the work ended, after waiting for it; None where there is none."""
    error = work.exception()
    _BEGUN.discard(work)
    return error


@functools.cache
def _background() -> ThreadPoolExecutor:
    """The thread of background work, done in order: it runs where no other thread wants to, as do threads that it
    starts.

    On Linux its policy is SCHED_IDLE: with the lowest usual priority it made steps beside it 3 % longer
    (`benchmarks.saving`). Where no processor is ever idle the next save waits for it, and meanwhile no step runs.

    Work that was begun is finished before the program ends, and errors that nobody has awaited are printed. `atexit`
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
        with suppress(OSError):  # a sandbox may know the usual policy alone; a save is worth more than its priority
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
