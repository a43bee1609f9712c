"""The phases of a function on its way to devices, reported to people: a log line each, and a progress bar for long
ones.

Lines go to the logger `autopar` at level INFO: what was done, its seconds, and the outcome. A bar is shown on stderr
only if that is a terminal, once a phase has taken `PATIENCE_SECONDS`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Columns

from passes.progress import Progress, Report, silent
from passes.text import quantities

LOGGER = logging.getLogger("autopar")

PATIENCE_SECONDS = 2.0
"""Seconds after which people want to know what takes so long."""


def words(progress: Progress) -> str:
    """The progress as text: `solve x=8, best 1.36 ms, 40 s left`."""
    parts = [progress.phase]
    if progress.best_seconds is not None:
        parts.append(f"best {quantities.seconds(progress.best_seconds)}")
    if progress.seconds_left is not None:
        parts.append(f"{progress.seconds_left:.0f} s left")
    return ", ".join(parts)


@dataclass(slots=True)
class Bar:
    """A progress bar on a terminal, from `patience_seconds` after its start until its end, when it is removed."""

    doing: str
    console: Console
    patience_seconds: float = PATIENCE_SECONDS
    is_over: bool = False
    _columns: Columns | None = None
    _task: TaskID | None = None
    _last: Progress | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _timer: threading.Timer | None = None

    def start(self) -> None:
        """Begins to wait until the bar is shown; on anything but a terminal it never is."""
        if self.console.quiet or not self.console.is_terminal:
            return
        if self.patience_seconds == 0:
            self._show()
            return
        self._timer = threading.Timer(self.patience_seconds, self._show)
        self._timer.daemon = True
        self._timer.start()

    def report(self, progress: Progress) -> None:
        """Moves the bar."""
        self._last = progress
        with self._lock:
            if self._columns is not None and self._task is not None:
                description = escape(f"{self.doing}: {words(progress)}" if self.doing else words(progress))
                self._columns.update(self._task, description=description, completed=progress.done, total=progress.total)

    def stop(self) -> None:
        """Removes the bar."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self.is_over = True
            if self._columns is not None:
                self._columns.stop()

    def _show(self) -> None:
        with self._lock:
            if self.is_over:
                return
            texts = (TimeElapsedColumn(), TextColumn("{task.description}"))
            columns = Columns(
                BarColumn(bar_width=20), MofNCompleteColumn(), *texts, console=self.console, transient=True
            )
            self._task = columns.add_task(escape(self.doing or "trace"), total=None)
            columns.start()
            self._columns = columns
        if self._last is not None:
            self.report(self._last)


@contextmanager
def shown(console: Console, doing: str = "", patience_seconds: float = 0.0) -> Iterator[Bar]:
    """A progress bar on `console` for the duration of a context; it does nothing without a terminal."""
    bar = Bar(doing, console, patience_seconds)
    bar.start()
    try:
        yield bar
    finally:
        bar.stop()


@dataclass(slots=True)
class Phase:
    """A phase while it lasts: `report` moves its bar, and `outcome` is what its log line says at the end."""

    report: Report
    outcome: str = ""


PhaseOf = Callable[[str], AbstractContextManager[Phase]]
"""A verb to the phase of a function that it names, while that lasts."""


@contextmanager
def unsaid(verb: str) -> Iterator[Phase]:
    """A context for a phase that is part of another: no line, no bar."""
    yield Phase(silent)


@contextmanager
def phase(doing: str, report: Report | None = None) -> Iterator[Phase]:
    """A context for a phase: a log line at the end, and a bar if it takes long, unless the user has a `report` of their
    own.
    """
    console = Console(stderr=True, highlight=False, quiet=report is not None)
    began = time.perf_counter()
    with shown(console, doing, PATIENCE_SECONDS) as bar:
        current = Phase(report or bar.report)
        yield current
    spent = quantities.seconds(time.perf_counter() - began)
    LOGGER.info("%s: %s", doing, f"{spent}, {current.outcome}" if current.outcome else spent)
