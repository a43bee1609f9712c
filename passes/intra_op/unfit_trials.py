"""The variants of a step whose plans exceed the memory limit, and the bytes that others may need by them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from passes.intra_op.mesh_search import MeshSearch
from passes.step import Variant

_LOW_MEMORY = 4
"""The number of variants of least memory that are kept, to be planned for even less of it where none fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A variant that was planned: its search over meshes, and the seconds of its plan if that fits, else infinity."""

    variant: Variant
    search: MeshSearch
    seconds: float = math.inf


@dataclass(slots=True, kw_only=True)
class UnfitTrials:
    """The variants that were planned and exceed the limit.

    `waiting` are those whose cheapest plan does, put off until some variant fits; of the others no plan that fits was
    found: `low_memory` are those of least memory, and `refused` those of which hand-made plans were left out.
    """

    waiting: list[Trial] = field(default_factory=list[Trial])
    low_memory: list[Trial] = field(default_factory=list[Trial])
    refused: list[Trial] = field(default_factory=list[Trial])
    _nbytes: dict[Variant, dict[int, float]] = field(default_factory=dict[Variant, "dict[int, float]"])

    def put_off(self, trial: Trial) -> None:
        """Adds a variant whose cheapest plan does not fit to those that wait."""
        self._note_bytes(trial)
        self.waiting.append(trial)

    def add(self, trial: Trial) -> None:
        """Adds a variant of which no plan that fits was found."""
        others = sorted([*self.low_memory, trial], key=lambda other: other.search.problems.lowest_nbytes)
        self.low_memory = others[:_LOW_MEMORY]
        if trial.search.hand_made.left_out:
            self.refused.append(trial)
        self._note_bytes(trial)

    def expected_nbytes(self, variant: Variant) -> float:
        """The least bytes of a device that plans of a variant are expected to need; 0 where nothing is known.

        The same variant in fewer microbatches needs at least as much; twice as many need half as much or more.
        """
        by_count = self._nbytes.get(replace(variant, microbatches=1), {})
        return max((nbytes * min(1.0, count / variant.count) for count, nbytes in by_count.items()), default=0.0)

    def _note_bytes(self, trial: Trial) -> None:
        """Notes the least bytes that plans of a variant are expected to need, by its number of microbatches."""
        by_count = self._nbytes.setdefault(replace(trial.variant, microbatches=1), {})
        by_count[trial.variant.count] = trial.search.expected_nbytes
