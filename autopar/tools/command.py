"""A command of the command line, as a value: its help, its arguments and what it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.tools.targets import UsageError
from passes.text import Table

Output = str | Sequence[Table]

DONE = 0  # the exit status of a command that did what it was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: `run` gives what is printed and the exit status; `more` is what stands below the options."""

    name: str
    summary: str
    description: str
    more: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], tuple[Output, int]]


def write(path: Path, text: str, what: str) -> None:
    """Writes a file. Raises UsageError where it cannot."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {what} cannot be written: {error.strerror}") from error
