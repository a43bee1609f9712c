"""The bytes that a plan may need on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bytes that a plan may need on one device by prediction: all there are if it is `hand_made` or taken as it is,
    and no more than that if it is `searched`.

    A search picks what predictions flatter, so searched plans leave a margin for their errors.
    """

    searched: float
    hand_made: float

    @classmethod
    def equal(cls, nbytes: float) -> Self:
        """The same limit for all plans, without a margin."""
        return cls(searched=nbytes, hand_made=nbytes)

    def times(self, factor: float) -> Limits:
        """The limits multiplied by a factor."""
        return Limits(searched=factor * self.searched, hand_made=factor * self.hand_made)
