"""The console that benchmarks print their tables on, their results as JSON, and a bar for their progress."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDEST = 1000
"""The characters of a line where stdout is no terminal: more than any table has."""


def stdout() -> Console:
    """Stdout as a console: as wide as its terminal or, where it is none, so wide that no column is cut."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDEST)


def json_text(results: Any, indent: int | None = None) -> str:
    """Results as JSON, which has no NaN and no infinity: null in their place."""
    return json.dumps(_finite(results), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress_of_tasks(console: Console, total: int) -> Iterator[Callable[[str], Callable[[str], None]]]:
    """A function to call with the name of each task as it begins, which returns one to call with the task's phases.

    Both show what they are called with beside a bar of `total` tasks.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = -1

        def begin(name: str) -> Callable[[str], None]:
            nonlocal begun
            begun += 1
            bar.update(task, completed=begun, description=name)
            return lambda phase: bar.update(task, description=f"{name}: {phase}")

        yield begin
