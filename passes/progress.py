"""The context of a search: the deadline that its user may set, the callback that hears of progress, and Ctrl-C."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from passes.errors import InternalError

Result = TypeVar("Result")


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
    def seconds_left(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._end is None else max(0.0, self._end - time.perf_counter())

    def is_over(self) -> bool:
        """Whether the deadline is past; a caller leaves work out then, which is recorded in `was_met`."""
        is_past = self.seconds_left == 0
        self.was_met = self.was_met or is_past
        return is_past


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The next step of a search: `done` candidates of `total` (None: not known yet) are behind it.

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


@dataclass(slots=True)
class _Interruption:
    """Ctrl-C pressed during a search, with all of its parts; None while it was not."""

    cause: KeyboardInterrupt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """The limits of a search, and its connection to the user: who hears of progress, and whether Ctrl-C was pressed.

    From the `deadline` on nothing further is tried once there is a plan. Plans that take `cutoff` seconds a step or
    more are of no use. If `interruptible`, Ctrl-C ends the search early, and what was found so far is its result.
    """

    report: Report = silent
    deadline: Deadline = field(default_factory=Deadline)
    cutoff: float = math.inf
    interruptible: bool = False
    _interruption: _Interruption = field(default_factory=_Interruption)

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the search early, in this part or in another."""
        return self._interruption.cause is not None

    def ending_early(self) -> AbstractContextManager[None, bool]:
        """A block that Ctrl-C ends, of an interruptible search: the statement after it is the next one.

        What the block has found so far is kept by its variables. Other searches pass the interruption on.
        """
        return _EndingEarly(self._interruption if self.interruptible else None)

    def raise_if_interrupted(self) -> None:
        """Raises the interruption if that ended the search early: for a caller that has nothing to return."""
        if self._interruption.cause is not None:
            raise self._interruption.cause

    def kept(self, result: Result | None) -> Result:
        """The result of a search that was ended early. Raises the interruption where there is none."""
        if result is None:
            self.raise_if_interrupted()
            raise InternalError("a search has no result, and nothing ended it early")
        return result

    def part(self, name: str, *, best: Best, cutoff: float = math.inf) -> Self:
        """The context of a part of the search: its phases are named behind `name`, with the whole's best plan.

        Progress tells the time left until the deadline, too. An interruption ends the part and the whole.
        """

        def report(progress: Progress) -> None:
            phase = ": ".join(filter(None, (name, progress.phase)))
            best_seconds, seconds_left = best(progress.best_seconds), self.deadline.seconds_left
            self.report(replace(progress, phase=phase, best_seconds=best_seconds, seconds_left=seconds_left))

        return replace(self, report=report, cutoff=cutoff)


@dataclass(frozen=True, slots=True)
class _EndingEarly:
    """The context manager of `SearchContext.ending_early`."""

    interruption: _Interruption | None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if self.interruption is None or not isinstance(error, KeyboardInterrupt):
            return False
        self.interruption.cause = error
        return True
