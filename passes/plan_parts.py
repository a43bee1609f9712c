"""What a plan is made of: how it was found, its operators, its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.mesh import Mesh
from passes.moves import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """How the placements were found: `objective` and `bound` in seconds, `status` in words, phases timed in seconds."""

    planner: str
    status: str
    objective: float
    bound: float
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def gap(self) -> float:
        """(objective - bound) / objective: 0 is proven optimal."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node as the plan's reader sees it: what it is, where it stands in the user's code, how it is placed."""

    primitive: str
    source: str
    scope: str
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive operators on one mesh; this version plans one stage that covers the program."""

    mesh: Mesh
    first: int
    last: int
