"""The source that reads a file, recognised by the file's columns, and the rows of all files."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.published.foundry import FOUNDRY
from benchmarks.published.gpipe import GPIPE
from benchmarks.published.maxtext import MAXTEXT
from benchmarks.published.megatron import SC21, V100
from benchmarks.published.nanotron import NANOTRON
from benchmarks.published.other import COLLECTIVES, HARDWARE, ZERO
from benchmarks.published.rows import Row, Source
from benchmarks.published.zero_bubble import ZERO_BUBBLE

DATA = Path(__file__).resolve().parent / "data"

SOURCES = (SC21, V100, ZERO_BUBBLE, NANOTRON, FOUNDRY, MAXTEXT, GPIPE, ZERO, COLLECTIVES, HARDWARE)

NAMES = tuple(name for source in SOURCES for name in source.names)


def read(folders: Sequence[Path]) -> tuple[list[Row], list[Path]]:
    """(all rows of the folders' CSV files, the files that no source reads). Raises ValueError, naming the file."""
    rows: list[Row] = []
    unread: list[Path] = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.csv"))):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            source = source_of(reader.fieldnames or ())
            if source is None:
                unread.append(path)
                continue
            try:
                rows += source.read(list(reader))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    return _numbered(rows), unread


def source_of(columns: Sequence[str]) -> Source | None:
    """The source whose columns are all among these, None if there is none."""
    return next((source for source in SOURCES if source.columns <= set(columns)), None)


def _numbered(rows: Sequence[Row]) -> list[Row]:
    """The rows, with a number behind each name that a source has several times."""
    times, seen = Counter((row.source, row.name) for row in rows), Counter[tuple[str, str]]()
    numbered: list[Row] = []
    for row in rows:
        key = row.source, row.name
        seen[key] += 1
        numbered.append(row if times[key] == 1 else replace(row, name=f"{row.name} #{seen[key]}"))
    return numbered


def spread(rows: Sequence[Row], limit: int) -> list[Row]:
    """At most `limit` rows with a question of each source, evenly spread, with their bases; 0 for all.

    Rows without a question stay: listing them costs nothing.
    """
    if not limit:
        return list(rows)
    kept: set[tuple[str, str]] = set()
    for name in dict.fromkeys(row.source for row in rows):
        questions = [row for row in rows if row.source == name and row.question is not None]
        some = [questions[i * len(questions) // limit] for i in range(limit)] if len(questions) > limit else questions
        kept |= {(name, label) for row in some for label in (row.name, row.base)}
    return [row for row in rows if row.question is None or (row.source, row.name) in kept]
