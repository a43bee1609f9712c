"""Tables as values: rows of text that plain text and rich terminals both draw."""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import dataclass, replace

GAP = "  "
NARROWEST = 12
"""Characters that a column which wraps has at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its heading; `right` aligns numbers; a `flexible` one wraps where the table is too wide."""

    heading: str
    right: bool = False
    flexible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A title, columns, rows of cells [rows, columns], and a note under them."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def is_headed(self) -> bool:
        """Whether headings are printed: there are some, and rows under them."""
        return bool(self.rows) and any(column.heading for column in self.columns)

    def fitted(self, width: int) -> Table:
        """The same table with flexible cells broken into lines, so that its rows stay within `width` if they can."""
        widths = self._widths(width)
        rows = (tuple("\n".join(wrap(c, size)) for c, size in zip(row, widths, strict=True)) for row in self.rows)
        return replace(self, rows=tuple(rows))

    def format(self, width: int = 80) -> str:
        """The table as plain text."""
        widths = self._widths(width)
        headings = tuple(column.heading for column in self.columns)
        lines = [self.title] if self.title else []
        if self.is_headed:
            lines += self._lines(headings, widths)
        for row in self.fitted(width).rows:
            lines += self._lines(row, widths)
        if self.note:
            lines += textwrap.wrap(self.note, width, initial_indent=GAP, subsequent_indent=GAP)
        return "\n".join(lines)

    def _widths(self, width: int) -> list[int]:
        """Characters of each column; the widest flexible ones shrink until the row fits."""
        cells = (tuple(column.heading for column in self.columns), *self.rows)
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        flexible: list[int] = [i for i, column in enumerate(self.columns) if column.flexible and widths[i] > NARROWEST]
        while sum(widths) + len(GAP) * len(widths) > width and flexible:
            widest = max(flexible, key=lambda i: widths[i])
            widths[widest] -= 1
            flexible = [i for i in flexible if widths[i] > NARROWEST]
        return widths

    def _lines(self, cells: tuple[str, ...], widths: list[int]) -> list[str]:
        lines = itertools.zip_longest(*(cell.split("\n") for cell in cells), fillvalue="")
        return [
            "".join(
                GAP + (part.rjust(size) if column.right else part.ljust(size))
                for part, size, column in zip(parts, widths, self.columns, strict=True)
            ).rstrip()
            for parts in lines
        ]


def wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width`, broken at spaces outside brackets, else at any space or after `.` `/` `]`."""
    lines: list[str] = []
    while len(text) > width:
        ends = range(width, width // 2, -1)
        spaces = (i for i in ends if text[i] == " " and text.count("[", 0, i) == text.count("]", 0, i))
        fallbacks = (i for i in ends if text[i] == " " or text[i - 1] in " ./]")
        end = next(itertools.chain(spaces, fallbacks), width)
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]
