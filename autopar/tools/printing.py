"""The output of commands on stdout: text as it is, and tables as wide as the terminal or as they need; and messages."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from autopar.tools.command import Output
from autopar.tools.targets import UsageError
from autopar.tools.wording import on_command_line
from passes.text import Table

WIDEST = 1000
"""Characters of a row that goes to no terminal: more than any table has, so that no cell is cut or broken into lines,
and `grep` finds a name whole. COLUMNS, where it is set, says how wide rows are there, too."""

_OWN = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("autopar", "passes"))
"""The beginnings of the paths of autopar's own code."""

UNREAD = 141
"""The exit status where what is printed is not read to its end: 128 and the number of SIGPIPE."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this where it has caught BrokenPipeError, and would end the program with 1


def printed(output: Output) -> None:
    """Prints text as it is and tables as rich tables.

    Where stdout is closed from the start, nothing is. Raises UsageError where nothing more can be written, and
    SystemExit where nobody reads any more, with the status of a program that SIGPIPE ends: 1 is an answer.
    """
    if sys.stdout is None:
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack what tables are drawn with
    try:
        _show(output)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written there at the end
        raise SystemExit(UNREAD) from None
    except OSError as error:
        raise UsageError(f"what it says cannot be printed: {error.strerror}") from error


def tell(message: str) -> None:
    """Prints a message on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(message))


@contextmanager
def warned(command: str) -> Iterator[None]:
    """A context in which warnings of autopar's own are shown as its messages are, without its source line."""
    usual = warnings.formatwarning

    def shown(
        message: Warning | str, category: type[Warning], filename: str, line: int, text: str | None = None
    ) -> str:
        is_own = issubclass(category, UserWarning) and filename.startswith(_OWN)
        return (
            f"autopar {command}: {on_command_line(str(message))}\n"
            if is_own
            else usual(message, category, filename, line, text)
        )

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _show(output: Output) -> None:
    if isinstance(output, str):
        if output:
            print(output.rstrip())
        return
    console = _Console(highlight=False)
    for table in output:
        console.print(Text(table.title, style="bold"))
        if table.rows and console.is_terminal:
            console.print(_rich(table.fitted(console.width)))
        elif table.rows:
            print(_plain(table, console.width if os.environ.get("COLUMNS") else WIDEST))
        console.print(Text(f"{table.note}\n" if table.note else ""))


def _plain(table: Table, width: int) -> str:
    """The rows as they are drawn on a terminal, each without the spaces at its end."""
    console = _Console(highlight=False, width=WIDEST)
    with console.capture() as drawn:
        console.print(_rich(table.fitted(width)))
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def _rich(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, show_header=table.is_headed, show_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        drawn.add_column(Text(column.heading), justify="right" if column.right else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
