"""How a search reports its progress to a callback, and the deadline that its user may set."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Deadline:
    """The time at which a search that was given `seconds` ends, counted from now; None for no time limit.

    Work is what ends a search otherwise: what is found within seconds depends on the machine and what else it does.
    """

    seconds: float | None = None
    was_met: bool = field(default=False, init=False)
    """Whether the search left something out because of the deadline."""
    _end: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._end = None if self.seconds is None else time.perf_counter() + self.seconds

    @property
    def left(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._end is None else max(0.0, self._end - time.perf_counter())

    def is_over(self) -> bool:
        """Whether the deadline is past.

        A caller leaves work out where it is, so that is recorded in `was_met`. Who asks leaves something out if so, and
        that is remembered.
        """
        self.was_met = self.was_met or self.left == 0
        return self.left == 0


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
    """The report that does nothing."""


Best = Callable[[float | None], float | None]
"""The whole's best plan in seconds, given that of a part."""


def within(outer: str, report: Report, *, best: Best, end: Deadline | None = None) -> Report:
    """The report of one part of a search: its phases are named behind `outer`, with the whole's best plan and time
    left.

    `end` is that of the whole.
    """

    def report_part(progress: Progress) -> None:
        left, phase = end.left if end else None, ": ".join(filter(None, (outer, progress.phase)))
        report(replace(progress, phase=phase, best_seconds=best(progress.best_seconds), seconds_left=left))

    return report_part
