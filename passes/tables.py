"""Tables as values: rows of text that plain text and rich terminals both draw."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

GAP = "  "
NARROWEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A heading; `right` for numbers; a `flexible` column wraps where the table is too wide."""

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

    def to_json(self) -> list[dict[str, str]]:
        """The rows as objects with the headings as keys."""
        return [{c.heading: cell for c, cell in zip(self.columns, row, strict=True)} for row in self.rows]

    def format(self, width: int = 80) -> str:
        """The table as text that no line of leaves `width`, unless its fixed columns alone do."""
        widths = self._widths(width)
        lines = [self.title] if self.title else []
        if any(column.heading for column in self.columns):
            lines += self._line(tuple(column.heading for column in self.columns), widths)
        for row in self.rows:
            lines += self._line(row, widths)
        if self.note:
            lines += textwrap.wrap(self.note, width, initial_indent=GAP, subsequent_indent=GAP)
        return "\n".join(lines)

    def _widths(self, width: int) -> list[int]:
        cells = [tuple(column.heading for column in self.columns), *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        flexible = [i for i, column in enumerate(self.columns) if column.flexible]
        while sum(widths) + len(GAP) * len(widths) > width and flexible:
            widest = max(flexible, key=lambda i: widths[i])
            if widths[widest] <= NARROWEST:
                break
            widths[widest] -= 1
        return widths

    def _line(self, cells: tuple[str, ...], widths: list[int]) -> list[str]:
        pieces = [wrap(cell, size) for cell, size in zip(cells, widths, strict=True)]
        lines: list[str] = []
        for i in range(max(map(len, pieces))):
            parts = [piece[i] if i < len(piece) else "" for piece in pieces]
            padded = [
                part.rjust(size) if column.right else part.ljust(size)
                for part, size, column in zip(parts, widths, self.columns, strict=True)
            ]
            lines.append((GAP + GAP.join(padded)).rstrip())
        return lines


def wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width`, broken at spaces and, in one long word, after `.`, `/` or `]`."""
    lines: list[str] = []
    rest = text
    while len(rest) > width:
        cut = next((i for i in range(width, width // 2, -1) if rest[i] == " " or rest[i - 1] in " ./]"), width)
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*lines, rest]
