"""The buffers of a step that lie in the place of an argument no longer read, or of an output not written yet.

XLA goes through the buffers from the largest to the smallest, and puts each into the smallest such place that is free
for as long as it lives, of equal ones into the last of a post-order visit. A buffer may end as the output is written if
it is written over.

Reference: XLA's BufferAssigner::AssignSingleHloBuffer, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from passes.memory.packing import Span


class Place(NamedTuple):
    """The place of an output: free after moment `after`, when its argument is last read, until `before`.

    The output is written in the moment `before`, over the last of one of the chains `over` if that is here. `turn` is
    its place in a post-order visit, or that of its argument.
    """

    nbytes: int
    after: int
    before: int
    over: frozenset[int] = frozenset()
    turn: int = 0


def unplaced(spans: Sequence[Span], places: Sequence[Place]) -> list[Span]:
    """The spans that find no place, in order."""
    free = sorted(
        (place for place in places if place.before - place.after > 1), key=lambda place: (place.nbytes, -place.turn)
    )
    placed = _placed(spans, free) if free else bytearray(len(spans))
    return [span for span, is_placed in zip(spans, placed, strict=True) if not is_placed]


def connected(spans: Sequence[Span]) -> list[Span]:
    """The spans, in order, of which those of a chain are one wherever one begins as the one before it ends."""
    remaining: list[Span] = []
    for span in spans:
        if remaining and span.chain >= 0 and remaining[-1].chain == span.chain and remaining[-1].last == span.first:
            before = remaining.pop()
            events = (*before.events, *span.events)
            span = before._replace(last=span.last, beside=max(before.beside, span.beside), events=events)
        remaining.append(span)
    return remaining


def _placed(spans: Sequence[Span], free: Sequence[Place]) -> bytearray:
    """Flags of the spans that find a place, the largest span first and each in the smallest place, [spans]."""
    spans_at: list[list[Span]] = [[] for _ in free]
    placed = bytearray(len(spans))
    for index in sorted(
        range(len(spans)), key=lambda index: (-spans[index].nbytes, spans[index].rank, spans[index].first)
    ):
        span = spans[index]
        for place, placed_there in zip(free, spans_at, strict=True):
            last = place.before if span.chain in place.over else place.before - 1
            if span.nbytes > place.nbytes or span.first <= place.after or span.last > last:
                continue
            if not any(_interfere(span, other) for other in placed_there):
                placed_there.append(span)
                placed[index] = True
                break
    return placed


def _interfere(first: Span, second: Span) -> bool:
    """Whether two spans may not lie in one place: they live at once, and neither is written over the other."""
    earlier, later = sorted((first, second), key=lambda span: span.first)
    if earlier.chain >= 0 and earlier.chain == later.chain and earlier.last == later.first:
        return False
    return earlier.last >= later.first
