"""Processes of one program on this machine: started, their output labelled, ended together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

from autopar.distributed import LOST, LOST_SECONDS
from autopar.errors import ArgumentError, explain

HELP = """\
Run a script in several processes of one program on this machine. Each joins the
others before the script begins; JAX then shows it the devices of all. Under
Slurm, Open MPI or Kubernetes, which start the processes themselves, the script
calls autopar.distributed.initialize() instead, which does nothing here."""

MORE = """\
example:
  autopar launch --processes 4 --devices-per-process 2 train.py --steps 100

Lines of output begin with the rank of their process. When one process fails,
the others are ended; so are all by Ctrl-C.

exit status: 0 all have succeeded, else that of the first that failed, or 128
and the number of the signal that ended it; 130 ended by Ctrl-C."""

GRACE_SECONDS = 5.0
"""Seconds that a process has to end itself when it is asked to, before it is killed."""

_LAST_SECONDS = 5.0
"""Seconds that the last of some processes has to report that it has lost the others: signs of life come every
second.
"""

_POLL_SECONDS = 0.05
"""Seconds between two looks at the processes: few to a person, many beside what a look takes."""

_POOL_THREADS = 8
"""The least number of XLA's threads on CPUs: a collective that waits for another process occupies one."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a launch: its exit status (0, that of the first process that failed, or 128 and the number of the
    signal that ended it), the ranks that failed or hung, and whether the user asked for it.
    """

    status: int
    gone: tuple[int, ...] = ()
    is_asked_for: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`processes` processes that each run a script with its arguments on `devices` virtual CPU devices.

    Without `devices` each has one accelerator, or JAX's own devices. With `bind_cores` each keeps to its own part of
    the processor's cores.
    """

    processes: int
    script: Path
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    devices: int | None = None
    bind_cores: bool = False
    grace_seconds: float = GRACE_SECONDS
    resume: Path | None = None
    lost_seconds: float = LOST_SECONDS
    report_seconds: float = 0.0
    """The time that processes have to say who failed, before they are ended."""

    def __post_init__(self) -> None:
        for name, value in (("--processes", self.processes), ("--devices-per-process", self.devices)):
            if value is not None and value < 1:
                rule = "should be a whole number from 1"
                raise ArgumentError(explain(f"{name} {value}", rule, "", "write, say, 2"))
        if not self.script.is_file():
            rule = f"there is no file {self.script.absolute()}"
            raise ArgumentError(explain(f"script {self.script}", rule, "", "give the path of a Python file"))

    def run(self, out: TextIO, err: TextIO) -> Ending:
        """The end of all processes.

        Lines of the processes are printed with their rank in front. When one fails, the others are ended; so are all if
        this is interrupted or terminated.
        """
        writing = threading.Lock()
        started: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        try:
            with _terminable():
                for rank, arguments in enumerate(self._commands()):
                    with _on_cores(self.cores(rank)):
                        process = self._start(arguments)
                    started.append(process)
                    readers += [
                        _reader(process.stdout, rank, out, writing),
                        _reader(process.stderr, rank, err, writing),
                    ]
                ending = self._watched(started, err, writing)
        except (KeyboardInterrupt, _Terminated) as signalled:
            number = signal.SIGINT if isinstance(signalled, KeyboardInterrupt) else signal.SIGTERM
            self._end(started, number)
            ending = Ending(128 + number, (), True)
        except BaseException:
            self._end(started, signal.SIGTERM)
            raise
        for reader in readers:
            reader.join(self.grace_seconds)
        return ending

    def _commands(self) -> Iterator[list[str]]:
        port = _free_port()
        for rank in range(self.processes):
            joined = [f"{LOOPBACK}:{port}", str(self.processes), str(rank), str(self.devices or 0)]
            joined += [str(self.lost_seconds), str(self.resume or "")]
            yield [sys.executable, "-u", "-m", "autopar.tools.launched", *joined, str(self.script), *self.arguments]

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        threads = max(_POOL_THREADS, 4 * (self.devices or 1))
        return subprocess.Popen(
            arguments,
            env={"NPROC": str(threads), **self.environment},
            stdin=subprocess.PIPE,  # closed when this process ends, in whichever way: then they end, too
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is passed on by this process, once
        )

    def cores(self, rank: int) -> set[int]:
        """The cores of a process; none for all. Raises ArgumentError where cores cannot be bound."""
        if not self.bind_cores:
            return set()
        if not hasattr(os, "sched_setaffinity"):
            rule = "this system does not bind processes to cores"
            raise ArgumentError(explain("--bind-cores", rule, sys.platform, "leave it out"))
        cores, n = sorted(os.sched_getaffinity(0)), self.processes
        return set(cores[rank * len(cores) // n : (rank + 1) * len(cores) // n] or [cores[rank % len(cores)]])

    def _watched(self, started: Sequence[subprocess.Popen[str]], err: TextIO, writing: threading.Lock) -> Ending:
        """The end of processes that run to it, or until one fails, or hangs after another has ended."""
        stopped: dict[int, float] = {}
        while True:
            codes = [process.poll() for process in started]
            now = time.monotonic()
            running = [rank for rank, code in enumerate(codes) if code is None]
            alone = [rank for rank in running if 0 in codes and _is_stopped(started[rank].pid)]
            stopped = {rank: stopped.get(rank, now) for rank in alone}
            if late := [rank for rank, since in stopped.items() if now - since > self.lost_seconds]:
                # Others tell of who stands still in their company; who does so at its end has nobody left.
                with writing:
                    err.write(f"autopar launch: process {late[0]} has been stopped, and no other waits; it is ended\n")
                    err.flush()
                self._end([started[rank] for rank in late], signal.SIGKILL)
                continue
            # Who ends because another one is gone is not the first that failed, though it may be seen first.
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                first = next((rank for rank in failed if codes[rank] != LOST), failed[0])
                code = codes[first] or 0
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                count = f"{len(running)} {'is' if len(running) == 1 else 'are'}"
                others = f"the other {count} ended" if running else "no other runs"
                with writing:
                    err.write(f"autopar launch: process {first} {how}; {others}\n")
                    err.flush()
                self._await_reports(started)
                gone = tuple(rank for rank, process in enumerate(started) if process.poll() not in (0, LOST))
                # Who has had its time to report is stopped or stuck, and would not end itself.
                self._end(started, signal.SIGKILL if self.report_seconds else signal.SIGTERM)
                return Ending(128 - code if code < 0 else code, gone)
            if None not in codes:
                return Ending(0)
            time.sleep(_POLL_SECONDS)

    def _await_reports(self, started: Sequence[subprocess.Popen[str]]) -> None:
        """Waits until all processes but the lost one have ended, which is given a moment to end itself, too."""
        deadline = time.monotonic() + self.report_seconds
        while (now := time.monotonic()) < deadline:
            codes = [process.poll() for process in started]
            if None not in codes:
                return
            if codes.count(None) == 1 and not {*codes} - {None, 0, LOST}:
                deadline = min(deadline, now + _LAST_SECONDS)
            time.sleep(_POLL_SECONDS)

    def _end(self, started: Sequence[subprocess.Popen[str]], number: signal.Signals) -> None:
        """Asks the processes that still run to end, and kills those that do not.

        JAX keeps SIGTERM for itself in a process that has joined others, so it is followed by SIGKILL.
        """
        _signal(started, number)
        deadline = time.monotonic() + self.grace_seconds
        try:
            while any(process.poll() is None for process in started) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        finally:  # a second Ctrl-C waits no longer
            _signal(started, signal.SIGKILL)
        for process in started:
            process.wait()
            with suppress(ProcessLookupError):  # what it has started holds its output open: JAX's service, say
                os.killpg(process.pid, signal.SIGKILL)


class _Terminated(BaseException):
    """The arrival of SIGTERM."""


@contextmanager
def _terminable() -> Iterator[None]:
    """A context in which SIGTERM raises an exception, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _on_cores(cores: set[int]) -> Iterator[None]:
    """A context in which new processes run on these cores alone, if there are any."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _is_stopped(process: int) -> bool:
    """Whether a signal has stopped the child process; False where the system cannot tell."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has just ended
        return False


def _signal(started: Sequence[subprocess.Popen[str]], number: signal.Signals) -> None:
    """Sends a signal to the processes that still run, and to what they have started."""
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, number)


def _reader(stream: IO[str] | None, rank: int, to: TextIO, writing: threading.Lock) -> threading.Thread:
    """A thread that copies lines with their rank."""
    assert stream is not None

    def read() -> None:
        for line in stream:
            with writing:
                to.write(f"[{rank}] {line}" if line.endswith("\n") else f"[{rank}] {line}\n")
                to.flush()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
