"""The warning about arguments that were placed on several devices and still have to move, given once, with
their bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Sharding

from autopar.errors import explain
from autopar.frontend import arriving
from passes.text import count, nbytes

_REMEDY = (
    'place them as step.placement(...) says, plan around them with placed="keep" or in_shardings=, or, where another '
)
_REMEDY += "parallel function returns them, with follow="


@dataclass(slots=True, kw_only=True)
class Moves:
    """The arguments `names` of a function at `source`; a first call warns of those that move."""

    names: Sequence[str]
    source: str
    is_told: bool = field(default=False, init=False)

    def tell(self, leaves: Sequence[Any], targets: Sequence[Sharding], moving: Sequence[int]) -> None:
        """Warns of arguments that move although they were on several devices, unless it has warned before.

        Some of the arguments at `moving` may only take another type, and are where they should be.
        """
        if self.is_told:
            return
        self.is_told = True
        placed = [
            i
            for i, there in zip(moving, arriving([leaves[i] for i in moving]), strict=True)
            if there and there.num_devices > 1 and not there.is_equivalent_to(targets[i], leaves[i].ndim)
        ]
        if placed:
            total = sum(leaves[i].nbytes for i in placed)
            largest = max(placed, key=lambda i: leaves[i].nbytes)
            others = f" and {count(len(placed) - 1, 'argument')} more" if len(placed) > 1 else ""
            rule = f"{nbytes(total)} were placed and have to move to where the plan reads them, now and each time"
            warnings.warn(explain(f"{self.names[largest]}{others}", rule, self.source, _REMEDY), stacklevel=7)
