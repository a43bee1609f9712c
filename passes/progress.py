"""What a search tells of itself while it runs, to whoever asks for it with a callback."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a search is about to do: `done` candidates of `total` (None: not known yet) are behind it.

    `best_seconds` is the predicted step of the best plan so far, None without one; `seconds_left` what is left of a
    time budget, None where there is none.
    """

    phase: str
    done: int
    total: int | None
    best_seconds: float | None = None
    seconds_left: float | None = None


Report = Callable[[Progress], None]
"""Hears of progress; what it raises ends the search."""


def silent(progress: Progress) -> None:
    """Reports to nobody."""


Best = Callable[[float | None], float | None]
"""The whole's best plan in seconds, given that of a part."""


def within(outer: str, report: Report, *, best: Best, end: float = math.inf) -> Report:
    """A report of one part of a search: its phases stand behind `outer`, the whole's best plan and time left are told.

    `end` is the `time.perf_counter()` at which the whole's budget ends, infinite for none.
    """

    def told(progress: Progress) -> None:
        left = max(0.0, end - time.perf_counter()) if math.isfinite(end) else None
        phase = ": ".join(filter(None, (outer, progress.phase)))
        report(replace(progress, phase=phase, best_seconds=best(progress.best_seconds), seconds_left=left))

    return told
