"""The best plan so far of a search over the variants of a step within a memory limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from passes.plan import Plan

GOOD_ENOUGH = 1.02
"""A plan this close, as a factor of its seconds, to the step without a limit is good enough: variants of less memory
take longer, as they compute more (`python -m benchmarks.memory_limit` shows what a limit costs). Nor is it bisected
which layers may keep more: that took ten of 17 s of residual layers within .85 of their memory, 1.4 % above, and gained
nothing.
"""

_BY_OFFLOADING = 4.0
"""The multiple of its time without a limit up to which the step as it is written, with state offloaded, is what other
variants are compared with; beyond that a bisection finds what fits. Nine residual layers within .95 of their memory:
2.6, then 2.1.
"""


@dataclass(slots=True, kw_only=True)
class Incumbent:
    """The best plan so far that fits; no plan takes less than `least_seconds`, as none does without a limit.

    The plan `by_offloading` is put off to the end, as it takes much longer than that.
    """

    best: Plan | None = None
    by_offloading: Plan | None = None
    least_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a step by the best plan; infinite without one."""
        return self.best.step_seconds if self.best else math.inf

    @property
    def fastest(self) -> Plan | None:
        """The fastest plan so far, also if it was put off; None if there is none."""
        return min(filter(None, (self.best, self.by_offloading)), key=lambda plan: plan.step_seconds, default=None)

    @property
    def is_good_enough(self) -> bool:
        """Whether the best plan takes hardly longer than one without a limit may."""
        return self.seconds <= GOOD_ENOUGH * self.least_seconds

    def offer(self, plan: Plan) -> bool:
        """Whether a plan, which fits, is faster than the best so far; if so, it is the best now."""
        if is_best := plan.step_seconds < self.seconds:
            self.best = plan
        return is_best

    def put_off(self) -> None:
        """Puts the best plan off to the end if it takes much longer than one without a limit may."""
        if self.best is not None and self.seconds > _BY_OFFLOADING * self.least_seconds:
            self.by_offloading, self.best = self.best, None
