"""Worker processes that share work: each has a copy of one object, whose methods are called with other arguments.

The caller works too, so nothing waits for a process to start, and results do not depend on who computes them. Processes
are fresh interpreters that import nothing of the caller's script and nothing of JAX; they end with the pool, or when
the caller does.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

_GOODBYE_SECONDS = 2.0
"""Seconds that a process has to end before it is killed."""

MOST_PROCESSES = 8
"""The most processes, the caller included, however many processors there are: each holds a copy of the program, and
results do not depend on their number. `python -m benchmarks.planning cases` shows memory and time.
"""

Task = tuple[Any, ...]


def processors() -> int:
    """The number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerPool:
    """Copies of a `served` object in worker processes: one for each further processor that the caller may use.

    They start when `call` first has more than one task; `with` ends them. Where the system allows fewer processes,
    there are fewer.
    """

    def __init__(self, served: object, count: int | None = None) -> None:
        self.served = served
        self.count = min(processors() if count is None else count, MOST_PROCESSES) - 1
        self.workers: list[_Worker] = []

    def call(self, method: str, tasks: Sequence[Task]) -> list[Any]:
        """`served.method(*task)` for every task, in order. Raises the error of the first task that failed."""
        if len(tasks) > 1 and not self.workers:
            self._start()
        job = _Job(method, tasks)
        for worker in self.workers:
            worker.join(job)
        for number in job.take_all():
            job.done(number, _tried(self.served, method, tasks[number]))
        return job.results()

    def _start(self) -> None:
        """Starts the processes, as many as the system allows: later calls ask for no more, and the caller works too."""
        with suppress(OSError, RuntimeError):
            while len(self.workers) < self.count:
                self.workers.append(_Worker(self.served))
        self.count = len(self.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.end()
        self.workers.clear()


class _Job:
    """The tasks of one call of a pool, and the results so far."""

    def __init__(self, method: str, tasks: Sequence[Task]) -> None:
        self.method, self.tasks = method, tasks
        self.waiting = deque(range(len(tasks)))
        self.outcomes: dict[int, tuple[bool, Any]] = {}
        self.news = threading.Condition()

    def take_all(self) -> Iterator[int]:
        """The numbers of the tasks that nobody has taken yet, in order; a task that a worker gives back comes again."""
        while True:
            with self.news:
                while not self.waiting and len(self.outcomes) < len(self.tasks):
                    self.news.wait()
                if not self.waiting:
                    return
                number = self.waiting.popleft()
            yield number

    def take(self) -> int | None:
        """The next task for a worker, None if there is none."""
        with self.news:
            return self.waiting.popleft() if self.waiting else None

    def give_back(self, number: int) -> None:
        """Puts back a task that a worker could not do."""
        with self.news:
            self.waiting.append(number)
            self.news.notify_all()

    def done(self, number: int, outcome: tuple[bool, Any]) -> None:
        with self.news:
            self.outcomes[number] = outcome
            self.news.notify_all()

    def results(self) -> list[Any]:
        for _, (failed, outcome) in sorted(self.outcomes.items()):
            if failed:
                raise outcome
        return [outcome for _, (_, outcome) in sorted(self.outcomes.items())]


class _Worker:
    """One worker process, and the thread that talks to it."""

    def __init__(self, served: object) -> None:
        root = str(Path(__file__).parents[2])
        script = f"import sys; sys.path.insert(0, {root!r}); from passes.pipeline.workers import serve; serve()"
        self.process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.thread = threading.Thread(target=self._talk, daemon=True)
        self.served = served
        self.jobs: deque[_Job] = deque()
        self.news = threading.Condition()
        self.ended = False
        try:
            self.thread.start()
        except RuntimeError:  # there are no more threads to be had
            self.end()
            raise

    def join(self, job: _Job) -> None:
        """Takes part in a job as long as it has tasks."""
        with self.news:
            self.jobs.append(job)
            self.news.notify()

    def end(self) -> None:
        """Ends the process, whatever it is at, then the thread that talks to it, and closes their streams."""
        with self.news:
            self.ended = True
            self.news.notify()
        self.process.terminate()
        try:
            self.process.wait(_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.thread.ident is not None:  # it was started
            self.thread.join()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # a message that was cut off
                cast("IO[bytes]", stream).close()

    def _talk(self) -> None:
        """Sends one task after the other to the process; if the process is gone, its task is given back."""
        calls, answers = self.process.stdin, self.process.stdout
        assert calls is not None
        assert answers is not None
        job, number = None, None
        try:
            _send(calls, self.served)
            pickle.load(answers)  # it is there
            while (job := self._job()) is not None:
                while (number := job.take()) is not None:
                    _send(calls, (job.method, job.tasks[number]))
                    job.done(number, pickle.load(answers))
        except Exception:  # whatever it is, the caller does the task itself and sees what comes of it
            self.ended = True
            if job is not None and number is not None:
                job.give_back(number)

    def _job(self) -> _Job | None:
        """The latest job; None at the end."""
        with self.news:
            while not self.jobs and not self.ended:
                self.news.wait()
            if self.ended:
                return None
            job = self.jobs.pop()
            self.jobs.clear()
            return job


def _send(stream: IO[bytes], message: object) -> None:
    stream.write(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
    stream.flush()


def _tried(served: object, method: str, task: Task) -> tuple[bool, Any]:
    """(True, error) of a call that failed, or (False, result)."""
    try:
        return False, getattr(served, method)(*task)
    except Exception as error:
        return True, error


def serve() -> None:
    """Runs a worker process: it receives the object, then calls of it, until the caller ends. Ctrl-C is left to the
    caller.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _channel() as (calls, answers), suppress(EOFError, BrokenPipeError):
        served = pickle.load(calls)
        _send(answers, True)
        while True:
            method, task = pickle.load(calls)
            _send(answers, _tried(served, method, task))


@contextmanager
def _channel() -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """The streams of calls and answers; whatever else is written to stdout, as by a solver, goes to stderr."""
    with os.fdopen(os.dup(0), "rb") as calls, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        yield calls, answers
