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
    """The spans beside the chip, in order; what has to be there up to a moment ends then if the chip has room."""
    if not room_nbytes:
        return list(spans)
    used = np.zeros(moments, dtype=np.int64)
    ends = [span.last for span in spans]
    begins = [max(span.first, span.beside + 1) for span in spans]
    order = sorted(range(len(spans)), key=lambda i: (spans[i].nbytes * (ends[i] - begins[i] + 1), i))
    for index in order:
        there = used[begins[index] : spans[index].last + 1]
        if len(there) and spans[index].nbytes + int(there.max()) <= room_nbytes:
            there += spans[index].nbytes
            ends[index] = begins[index] - 1
    kept = zip(spans, ends, strict=True)
    return [span if end == span.last else span._replace(last=end) for span, end in kept if end >= span.first]
