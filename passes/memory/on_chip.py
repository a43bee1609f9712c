"""The buffers that find no room in the memory of the chip itself, which a TPU's compiler fills before that beside it.

What is small and soon read comes first, as it loads the memory beside the chip the most for the room that it takes.

Reference: XLA's MemorySpaceAssignment, as of jaxlib 0.10; its order by estimated benefit is taken as one by bytes times
time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.memory.packing import Span


def off_chip(spans: Sequence[Span], moments: int, room_nbytes: int) -> list[Span]:
    """The spans that are not on the chip, in order."""
    if not room_nbytes:
        return list(spans)
    used = np.zeros(moments, dtype=np.int64)
    outside: set[int] = set()
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].nbytes * (spans[i].last - spans[i].first + 1), i)):
        span = spans[index]
        there = used[span.first : span.last + 1]
        if span.nbytes + int(there.max(initial=0)) <= room_nbytes:
            there += span.nbytes
        else:
            outside.add(index)
    return [span for index, span in enumerate(spans) if index in outside]
