"""The seconds that a search has taken, and whether they exceed its user's limit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_LEAST_SECONDS = 0.1
"""Seconds that a solve gets even where none are left: solvers take 0 for no limit."""


@dataclass(slots=True)
class Clock:
    """The seconds spent on building programs and on solving them, at most `limit` if there is one.

    A search that is continued continues its clock: the time between does not count.
    """

    limit: float | None
    build_seconds: float = field(default=0.0, init=False)
    solve_seconds: float = field(default=0.0, init=False)
    _start: float = field(default_factory=time.perf_counter, init=False)

    def go_on(self) -> None:
        """Starts to count again, in addition to the seconds so far."""
        self._start = time.perf_counter() - self.build_seconds - self.solve_seconds

    def built(self) -> None:
        """Counts the time since the last call as building programs."""
        self.build_seconds = self.taken - self.solve_seconds

    def stop(self) -> None:
        """Counts the time since programs were built as solving them."""
        self.solve_seconds = self.taken - self.build_seconds

    @property
    def taken(self) -> float:
        """All seconds so far."""
        return time.perf_counter() - self._start

    @property
    def is_late(self) -> bool:
        """Whether the limit is over."""
        return self.limit is not None and self.taken > self.limit

    @property
    def remaining(self) -> float | None:
        """Seconds until the limit, if there is one."""
        return None if self.limit is None else max(_LEAST_SECONDS, self.limit - self.taken)
