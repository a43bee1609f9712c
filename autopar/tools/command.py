"""Commands of the command line as values: help, arguments and what they do; and functions that commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cache import PlanCache
from autopar.tools.targets import UsageError
from passes.files import write_whole
from passes.text import Table

Output = str | Sequence[Table]

DONE, DIFFERENT, TROUBLE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: done, an answer of no, an error, and what shells give a program that Ctrl-C ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: `run` returns what is printed and the exit status; `more` is the text below the options in
    its help.
    """

    name: str
    summary: str
    description: str
    more: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], tuple[Output, int]]


def kept_plans() -> PlanCache:
    """The cache of plans that commands use, in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return PlanCache(os.path.join(root, "autopar", "plans"))


def write(path: Path, contents: str | bytes, what: str) -> None:
    """Writes a file; a failure loses nothing of what was there before. Raises UsageError where it cannot."""
    try:
        write_whole(path, contents if isinstance(contents, bytes) else contents.encode())
    except OSError as error:
        raise UsageError(f"{path}: {what} cannot be written: {error.strerror}") from error


def check_writable(path: Path, what: str, *read: str | Path | None) -> None:
    """Raises UsageError where a file cannot be written, or is one of those that are `read`, before any work is done."""
    if any(other and path.is_file() and os.path.exists(other) and path.samefile(other) for other in read):
        raise UsageError(f"{path}: {what} would be written over what is read from there; name another file")
    if reason := unwritable(path):
        raise UsageError(f"{path}: {what} cannot be written: {reason}")


def unwritable(path: Path) -> str:
    """The reason why a file cannot be written; empty if none is known before it is tried."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    place = path if path.exists() and not path.is_file() else Path(os.path.realpath(path)).parent
    return "" if os.access(place, os.W_OK) else "no permission"
