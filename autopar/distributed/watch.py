"""Processes that give signs of life, and the report of one that gives none.

Each process puts a number into JAX's coordination service every second, in a thread of its own, and looks at those of
the others. It ends itself, with a line that names rank and host, when another one has failed or given no sign for a
while, or when the service cannot be reached: it would wait for ever otherwise. A process that has finished does so
too until JAX lets it go, which is when all have finished: who is lost meanwhile would keep it. The service runs beside
the first process, not in it, so that it outlives that one long enough to be asked.
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
"""The seconds between two signs of life: far fewer than `lost_seconds`, and a small message each."""
_JOIN_SECONDS = 5.0
"""So long a process that has failed waits for its sign of life that is under way, which would follow its last word."""

_DONE = "done"


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last sign of a process: its text, the steps begun, and since when the sign and its progress are the same."""

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
    """The watch of one process over all: lost is who gives no sign for `lost_seconds`.

    With `stall_seconds`, those are lost too that have begun fewer steps than others for so long. Who has finished with
    fewer never begins the next, in which the others wait: that is told `lost_seconds` later.
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
        """Begins to give and to look for signs of life."""
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
        """Says that this process has finished, in the signs that it goes on giving."""
        self.is_done = True

    def fail(self, error: BaseException) -> None:
        """Ends this process, which an error ends that nobody has caught.

        Of an error of JAX's, or of a connection, the reason may be another process, which is given the time to be found
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
        """Gives a sign and looks at the others', over and over."""
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
        """The reason why a process is as good as gone; empty if it is not."""
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
