"""The progress of a search as a bar on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from passes.progress import Progress, Report, silent
from passes.text import quantities


@contextmanager
def shown(console: Console) -> Iterator[Report]:
    """The report that moves a bar on `console`, removed afterwards; it does nothing without a terminal."""
    if console.quiet or not console.is_terminal:
        yield silent
        return
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("trace", total=None)
        yield lambda progress: bar.update(
            task, description=escape(words(progress)), completed=progress.done, total=progress.total
        )


def words(progress: Progress) -> str:
    """The progress as text: `solve x=8, best 1.36 ms, 40 s left`."""
    parts = [progress.phase]
    if progress.best_seconds is not None:
        parts.append(f"best {quantities.seconds(progress.best_seconds)}")
    if progress.seconds_left is not None:
        parts.append(f"{progress.seconds_left:.0f} s left")
    return ", ".join(parts)
