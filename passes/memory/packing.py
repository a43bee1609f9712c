"""The size of a heap in which every buffer has one place for as long as it lives.

XLA places buffers one after another, each in the smallest gap that it fits between those that live when it does: once
the largest first, once the longest-lived first, and keeps the smaller heap of the two. Of equals the first in the order
of the program goes first, a post-order that begins at the first output.

XLA:TPU places them as they come: what is soon freed lies between what stays, and a large one that comes late may find
no room there.

Reference: XLA's ChooseBestHeapAlgorithm over GlobalDecreasingSizeBestFitHeap, spatial and temporal, as of jaxlib 0.10;
for TPUs the offsets that libtpu 0.0.42 writes with `xla_dump_to`, whose gaps are up to a tenth of the heap larger.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes of which every place in the heap is a multiple, in XLA's CPU client."""

PLACED = 1024
"""The number of buffers that are placed one by one, the largest; the others fit between them, or are too small to
matter: on H100, GPT 350M under ZeRO-3 has 0.47 GB of gaps by 1,024 or more of its buffers, and 0.39 by 256. Placing
takes time with its square: `benchmarks.settings` halves and doubles it."""


class Span(NamedTuple):
    """A buffer that lives from moment `first` to moment `last`, both included; `made_by` identifies it.

    Those of one `chain` stand one after another, each written over the one before. Of equal ones that live equally
    long, the one of least `rank` is placed first. It has to lie `beside` the chip up to a moment, -1 for none. It is
    read at its `events`.
    """

    nbytes: int
    first: int
    last: int
    made_by: object = None
    chain: int = -1
    rank: int = 0
    beside: int = -1
    events: tuple[int, ...] = ()


def gaps_nbytes(spans: Sequence[Span]) -> int:
    """Bytes of the heap of the largest `spans` beyond those that ever live at once."""
    large = sorted(_clocked([span for span in spans if span.nbytes]), key=_spatial)[:PLACED]
    live = live_nbytes(large)
    gaps = heap_nbytes(large) - live
    return min(gaps, heap_nbytes(sorted(large, key=_temporal)) - live) if gaps else 0


def gaps_as_they_come(spans: Sequence[Span]) -> int:
    """Bytes of a heap beyond those that ever live at once, where spans are placed in the order in which they begin, of
    those that begin at once the largest first.
    """
    ends: list[tuple[int, int]] = []
    taken: dict[int, int] = {}
    heap = 0
    for span in sorted((span for span in spans if span.nbytes), key=lambda span: (span.first, -span.nbytes, span.rank)):
        while ends and ends[0][0] < span.first:
            del taken[heapq.heappop(ends)[1]]
        best, best_room, top = -1, 0, 0
        for start in sorted(taken):
            room = start - top
            if room >= span.nbytes and (best < 0 or room < best_room):
                best, best_room = top, room
            top = start + taken[start]
        start = top if best < 0 else best
        taken[start] = span.nbytes
        heapq.heappush(ends, (span.last, start))
        heap = max(heap, start + span.nbytes)
    return heap - live_nbytes(spans)


def _clocked(spans: Sequence[Span]) -> list[Span]:
    """The spans in the heap's own time, which goes on by one wherever a buffer begins or ends."""
    events = sorted(
        [(s.first, 0, s.last, i) for i, s in enumerate(spans)] + [(s.last, 1, 0, i) for i, s in enumerate(spans)]
    )
    first, last = [0] * len(spans), [0] * len(spans)
    for now, (_, ends, _, index) in enumerate(events):
        (last if ends else first)[index] = now
    return [Span(span.nbytes, first[i], last[i], rank=span.rank) for i, span in enumerate(spans)]


def live_nbytes(spans: Sequence[Span]) -> int:
    """The most bytes that live at once."""
    changes = sorted([(s.first, s.nbytes) for s in spans] + [(s.last + 1, -s.nbytes) for s in spans])
    most = live = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most


def _spatial(span: Span) -> tuple[int, int, int]:
    return (-span.nbytes, span.first - span.last, span.rank)


def _temporal(span: Span) -> tuple[int, int, int]:
    return (span.first - span.last, -span.nbytes, span.rank)


def heap_nbytes(spans: Sequence[Span]) -> int:
    """The heap with every span in the smallest gap that it fits, in this order."""
    firsts, lasts, starts, ends = (np.zeros(len(spans), dtype=np.int64) for _ in range(4))
    for count, span in enumerate(spans):
        meets = (firsts[:count] <= span.last) & (lasts[:count] >= span.first)
        start = _best_fit(span.nbytes, starts[:count][meets], ends[:count][meets])
        firsts[count], lasts[count], starts[count], ends[count] = span.first, span.last, start, start + span.nbytes
    return int(ends.max(initial=0))


def _best_fit(nbytes: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """The start of the smallest gap with room, the lowest of equal ones; else the end of the heap."""
    best, best_room, top = -1, 0, 0
    for place in np.argsort(starts, kind="stable"):
        room = int(starts[place]) - top
        if room >= nbytes and (best < 0 or room < best_room):
            best, best_room = top, room
        top = max(top, int(ends[place]))
    return top if best < 0 else best
