"""How large a heap is in which every buffer has one place for as long as it lives: never less than what lives at once.

XLA places buffers one after another, the largest first, each in the smallest gap that it fits between those that live
when it does.

Reference: XLA's GlobalDecreasingSizeBestFitHeap, ordered by size, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PLACED = 256
"""How many buffers are placed one by one, the largest: what is left fits between them, or is too small to matter."""


class Span(NamedTuple):
    """A buffer from moment `first` to moment `last`, both of which it lives in."""

    nbytes: int
    first: int
    last: int


def gaps_nbytes(spans: Sequence[Span]) -> int:
    """Bytes of the heap of the largest `spans` above those that ever live at once."""
    large = sorted((span for span in spans if span.nbytes), key=_largest_first)[:PLACED]
    return heap_nbytes(large) - live_nbytes(large)


def live_nbytes(spans: Sequence[Span]) -> int:
    """The most bytes that live at once."""
    changes = sorted([(s.first, s.nbytes) for s in spans] + [(s.last + 1, -s.nbytes) for s in spans])
    most = live = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most


def _largest_first(span: Span) -> tuple[int, int]:
    return (-span.nbytes, span.first)


def heap_nbytes(spans: Sequence[Span]) -> int:
    """The heap with every span in the smallest gap that it fits, in this order."""
    firsts, lasts, starts, ends = (np.zeros(len(spans), dtype=np.int64) for _ in range(4))
    for count, span in enumerate(spans):
        meets = (firsts[:count] <= span.last) & (lasts[:count] >= span.first)
        start = _best_fit(span.nbytes, starts[:count][meets], ends[:count][meets])
        firsts[count], lasts[count], starts[count], ends[count] = span.first, span.last, start, start + span.nbytes
    return int(ends.max(initial=0))


def _best_fit(nbytes: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """Where the smallest gap begins that has room, the lowest of equal ones; else behind everything."""
    best, best_room, top = -1, 0, 0
    for place in np.argsort(starts, kind="stable"):
        room = int(starts[place]) - top
        if room >= nbytes and (best < 0 or room < best_room):
            best, best_room = top, room
        top = max(top, int(ends[place]))
    return top if best < 0 else best
