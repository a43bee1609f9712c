"""The context of a search: its deadline, the callback for progress, and interruption by Ctrl-C."""

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
    """The time at which a search that may take `seconds` ends, counted from now; None is no time limit.

    By default the amount of work ends a search: what is found within seconds depends on the machine and its load.
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
        """Whether the deadline has passed; a caller then leaves work out, which is recorded in `was_met`."""
        is_past = self.seconds_left == 0
        self.was_met = self.was_met or is_past
        return is_past


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a search at its next step: `done` candidates of `total` (None: not known yet) are behind it.

    `best_seconds` is the predicted step of the best plan so far, None without one; `seconds_left` are those until the
    deadline, None without one.
    """

    phase: str
    done: int
    total: int | None
    best_seconds: float | None = None
    seconds_left: float | None = None


Report = Callable[[Progress], None]
"""A callback for progress; an exception that it raises ends the search."""


def silent(progress: Progress) -> None:
    """The callback that does nothing."""


Best = Callable[[float | None], float | None]
"""A function from the seconds of a part's best plan to those of the whole's."""


@dataclass(slots=True)
class _Interruption:
    """The Ctrl-C that was pressed during a search, shared by all of its parts; None before."""

    cause: KeyboardInterrupt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """The limits of a search, the callback for its progress, and whether its user interrupted it.

    From the `deadline` on nothing further is tried once there is a plan. Plans that take `cutoff` seconds a step or
    more are of no use. If `interruptible`, Ctrl-C ends the search early, and the result is what was found so far.
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
        """A context that Ctrl-C leaves, in an interruptible search: the next statement is the one after it.

        Variables keep what was found inside it so far. In other searches the interruption is passed on.
        """
        return _EndingEarly(self._interruption if self.interruptible else None)

    def raise_if_interrupted(self) -> None:
        """Raises the interruption if that ended the search early: for callers that have nothing to return."""
        if self._interruption.cause is not None:
            raise self._interruption.cause

    def kept(self, result: Result | None) -> Result:
        """The result of a search that was ended early. Raises the interruption where there is none."""
        if result is None:
            self.raise_if_interrupted()
            raise InternalError("a search has no result, and nothing ended it early")
        return result

    def part(self, name: str, *, best: Best, cutoff: float = math.inf) -> Self:
        """The context of a part of the search: its phases are reported behind `name`, with the best plan of the whole.

        Progress also has the time until the deadline. An interruption ends the part and the whole.
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
