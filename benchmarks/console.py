"""The console that benchmarks print their tables on."""

import sys

from rich.console import Console

WIDEST = 1000
"""Characters of a line where nobody looks at it on a terminal: more than any table has."""


def stdout() -> Console:
    """Stdout, as wide as its terminal; where it is none, as wide as what is printed, so that no column is cut."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDEST)
