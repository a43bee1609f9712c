"""Processes that give signs of life, and end when one of them is lost.

Each process puts a number into JAX's coordination service every second, in a thread of its own, and looks at those of
the others. When another one has failed or given no sign for a while, or when the service cannot be reached, it prints
that one's rank and host and ends itself: otherwise it would wait for ever. A process that has finished goes on until
JAX lets it go, when all have finished, as one may be lost meanwhile. The service runs beside the first process, not in
it, so that it outlives that one long enough to be asked.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

import jax

from autopar import jax_compat
from autopar.distributed.agreement import BEATS, FAILED, Processes
from autopar.errors import PeerError

LOST = 75
"""The exit status of a process that ends because another one is gone (EX_TEMPFAIL: try again)."""

_BEAT_SECONDS = 1.0
"""Seconds between two signs of life, each of them a small message; far fewer than `lost_seconds`."""
_JOIN_SECONDS = 5.0
"""Seconds that a process which has failed waits for a sign of life that is being sent, and would otherwise follow its
last one.
"""

_DONE = "done"


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last sign of a process: its text, the steps begun, and since when the sign and the steps have not changed."""

    text: str
    steps: int
    sign: float
    step: float

    def after(self, text: str, now: float) -> _Seen:
        steps = self.steps if text.startswith(FAILED) else int(text.split()[-1])
        is_same = (steps, text.startswith(_DONE)) == (self.steps, self.text.startswith(_DONE))
        return _Seen(text, steps, self.sign if text == self.text else now, self.step if is_same else now)


@dataclass(slots=True)
class Watch:
    """The watch of one process over all: a process is lost if it gives no sign for `lost_seconds`.

    With `stall_seconds`, a process is lost as well if it has begun fewer steps than others for that long. One that has
    finished with fewer steps never begins the next, in which the others wait: that is reported after `lost_seconds`.
    """

    processes: Processes
    hosts: tuple[str, ...]
    lost_seconds: float
    stall_seconds: float
    is_done: bool = False
    """Whether this process has finished, and waits for the others."""
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    """The one that gives signs of life."""

    def start(self) -> None:
        """Begins to give signs of life and to look for those of others."""
        self.thread = thread = threading.Thread(target=self._run, name="autopar watch", daemon=True)
        thread.start()
        atexit.register(self.finish)

        def end() -> None:
            self.ended.set()
            thread.join()  # Python's end would tear it out of a call of JAX's, which aborts the process

        jax_compat.at_disconnection(end)
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            self.fail(error)

        sys.excepthook = hook

    def finish(self) -> None:
        """Says in further signs of life that this process has finished."""
        self.is_done = True

    def fail(self, error: BaseException) -> None:
        """Ends this process after an error that nobody caught.

        The cause of an error of JAX's, or of a connection, may be another process, so there is some time to find that
        out.
        """
        if isinstance(error, jax.errors.JaxRuntimeError | PeerError):
            time.sleep(self.lost_seconds + 3 * _BEAT_SECONDS)
        self.ended.set()
        if self.thread:
            self.thread.join(_JOIN_SECONDS)
        self._put(f"{FAILED}{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        _leave(1)

    def _put(self, text: str) -> None:
        try:
            self.processes.client.key_value_set(f"{BEATS}/{self.processes.rank}", text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:  # nobody is there to be told
            return

    def _run(self) -> None:
        """Gives a sign of life and looks at the others', until the process ends."""
        client, now = self.processes.client, time.monotonic()
        seen = {rank: _Seen("", 0, now, now) for rank in self.processes.ranks}
        reached = now
        for number in range(sys.maxsize):
            if self.ended.wait(_BEAT_SECONDS):
                return
            try:
                beat = f"{number} {self.processes.steps[0]}"
                beat = f"{_DONE} {beat}" if self.is_done else beat
                client.key_value_set(f"{BEATS}/{self.processes.rank}", beat, allow_overwrite=True)
                pairs = client.key_value_dir_get(BEATS)
            except jax.errors.JaxRuntimeError as error:
                if time.monotonic() - reached > self.lost_seconds:
                    self._leave(f"the other processes cannot be reached for {self.lost_seconds:.0f} s: {error}")
                continue
            reached = time.monotonic()
            for key, text in pairs:
                rank = int(key.rpartition("/")[2])
                seen[rank] = seen[rank].after(text, reached)
            if gone := [reason for rank in seen if (reason := self._reason(rank, seen, reached))]:
                self._leave("; ".join(gone))

    def _reason(self, rank: int, seen: Mapping[int, _Seen], now: float) -> str:
        """The reason why a process is lost; empty if it is not."""
        last = seen[rank]
        if last.text.startswith(FAILED):
            return f"{self.name(rank)} has {last.text}"
        is_done = last.text.startswith(_DONE)
        if now - last.sign > self.lost_seconds:
            where = "at its end" if is_done else f"in step {last.steps} since its start"
            return f"{self.name(rank)} is lost: no sign of life for {self.lost_seconds:.0f} s, {where}"
        ahead = max(other.steps for other in seen.values())
        if last.steps == ahead or now - last.step <= (self.lost_seconds if is_done else self.stall_seconds):
            return ""
        if is_done:
            return f"{self.name(rank)} has ended: in step {last.steps} since its start, others are in step {ahead}"
        spent = f"{now - last.step:.0f} s"
        return f"{self.name(rank)} hangs: in step {last.steps} since its start for {spent}, others in step {ahead}"

    def name(self, rank: int) -> str:
        return f"process {rank} on host {self.hosts[rank]}"

    def _leave(self, reason: str) -> None:
        sys.stderr.write(f"autopar: {reason}; {self.name(self.processes.rank)} ends, as all do\n")
        _leave(LOST)


def _leave(status: int) -> None:
    """Ends the process at once: at a regular end JAX would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
