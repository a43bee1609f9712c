"""The buffers that find no room in the memory of the chip itself, which a TPU's compiler fills before that beside it.

Buffers are placed in turn, first those that save most time there for the square root of their bytes: whatever moves
bytes for longer than it computes is sped up. Each has one place on the chip for as many readers as there is one and as
come soon enough one after another. What does not stay lies beside the chip from when it is made, and is fetched before
a later reader if there is time and a place. So are arguments, which take room on the chip as well.

Reference: XLA's MemorySpaceAssignment, its CostAnalysis::GetMemoryBoundedness, CostAnalysisPrefetchIntervalPicker and
GlobalDecreasingSizeBestFitHeap (xla/service/memory_space_assignment), as of jaxlib 0.10, with the options that libtpu
0.0.42 writes with `xla_dump_to`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from passes.memory.moments import CostOf, Moments
from passes.memory.packing import Span

STAYS = 8.0
"""The times that all of the room could be copied while a buffer waits on the chip for its next reader:
`xla_msa_max_overlap_to_mem_size_async_copy_ratio`."""

FETCHED, FETCHED_LATE = 2.0, 1.0
"""The times that a buffer could be copied while it is fetched, at best and at least:
`xla_msa_preferred_overlap_to_async_copy_ratio` and `xla_msa_min_overlap_to_async_copy_ratio`."""


def whole(_nbytes: int) -> int:
    """The number of tables where nothing is fetched in slices."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The room on a chip, the bytes that are copied to or from it in a second, what kernels cost, and the number of
    tables of so many bytes that are fetched in slices.
    """

    room_nbytes: int
    bytes_per_second: float
    cost_of: CostOf
    tables_of: Callable[[int], int] = whole


class Beside(NamedTuple):
    """The `spans` beside the chip, and the number of `tables` of slices that are fetched from there."""

    spans: list[Span]
    tables: int = 0


def off_chip(spans: Sequence[Span], chip: Chip, moments: Moments, arguments: Sequence[Span] = ()) -> Beside:
    """The spans beside the chip, in order; what has to be there up to a moment ends then if the chip has room."""
    if not chip.room_nbytes:
        return Beside(list(spans))
    places, every = _Places(chip, moments), (*spans, *arguments)
    ends = [-1] * len(every)
    for index in sorted(range(len(every)), key=lambda index: (-places.saved(every[index]), index)):
        ends[index] = places.put(every[index], is_made=index < len(spans))
    kept = zip(spans, ends[: len(spans)], strict=True)
    beside = [span if end == span.last else span._replace(last=end) for span, end in kept if end >= span.first]
    return Beside(beside, places.tables)


class _Places:
    """The places on the chip that are `taken`: rows of first and last moments, first bytes and those after the last,
    of which so many as the `count` says are there. The `tables` are of what was fetched.
    """

    def __init__(self, chip: Chip, moments: Moments) -> None:
        self.chip, self.loops = chip, moments.loops
        self.clock: list[float] = [0.0, *np.cumsum([max(cost) for cost in moments.costs]).tolist()]
        self.bound = [cost.moving - cost.computing for cost in moments.costs]
        self.stays = STAYS * chip.room_nbytes / chip.bytes_per_second
        self.used = np.zeros(len(moments.costs), dtype=np.int64)
        self.taken = np.zeros((4, 1024), dtype=np.int64)
        self.count = self.tables = 0

    def saved(self, span: Span) -> float:
        """The seconds that a buffer saves on the chip, for the square root of its bytes; less than 0 where all kernels
        that write or read it compute for longer than they move bytes, by the seconds that the nearest to that does.
        """
        copied, most = span.nbytes / self.chip.bytes_per_second, -math.inf
        for moment in (span.first, *span.events):
            bound = self.bound[moment]
            gained = copied if bound > 0 else bound
            most = most + gained if most > 0 and gained > 0 else max(most, gained)
        return most / math.sqrt(max(span.nbytes, 1))

    def put(self, span: Span, *, is_made: bool) -> int:
        """The last moment in which a buffer has to lie beside the chip, less than its first where it never has; one
        that is not made by the program is an argument.
        """
        begin = max(span.first, span.beside + 1) if is_made else -1
        events = [begin, *sorted({e for e in (*span.events, span.last) if e > begin})]
        end, reached = begin - 1, 0
        if is_made and (reached := self._stay(span.nbytes, begin, events, 0)) < 0:
            end, reached = begin, 0
        while reached + 1 < len(events):
            end = events[reached + 1]
            reached = self._fetch(span.nbytes, events, reached + 1)
        return end

    def _fetch(self, nbytes: int, events: Sequence[int], to: int) -> int:
        """The number of the last event up to which a buffer stays once it is fetched, if it can be, for one of them."""
        copied = nbytes / self.chip.bytes_per_second
        for ratio in (FETCHED, FETCHED_LATE):
            begin = bisect_right(self.clock, self.clock[events[to]] - ratio * copied) - 1
            if begin >= events[to - 1] and (last := self._stay(nbytes, max(begin, 0), events, to)) >= 0:
                self.tables += self.chip.tables_of(nbytes)
                return last
        return to

    def _stay(self, nbytes: int, begin: int, events: Sequence[int], to: int) -> int:
        """The number of the last event, from one of them on, up to which a buffer has one place, which it takes; -1
        where it has none.
        """
        last = to
        while last + 1 < len(events) and self._waits(events[last], events[last + 1]):
            last += 1
        low, place = to - 1, -1
        while low < last:
            middle = (low + last + 1) // 2
            if (free := self._free(nbytes, begin, events[middle])) >= 0:
                low, place = middle, free
            else:
                last = middle - 1
        if low < to:
            return -1
        self._take(nbytes, begin, events[low], place)
        return low

    def _waits(self, before: int, event: int) -> bool:
        """Whether a buffer may wait on the chip between two events. What a loop reads is there as long as it runs."""
        return (before, event) in self.loops or self.clock[event] - self.clock[before + 1] <= self.stays

    def _free(self, nbytes: int, first: int, last: int) -> int:
        """The first byte of the smallest place that is free all the while, -1 for none."""
        room = self.chip.room_nbytes
        if nbytes + int(self.used[first : last + 1].max(initial=0)) > room:
            return -1
        begins, ends, lows, highs = self.taken[:, : self.count]
        meets = (begins <= last) & (ends >= first)
        order = np.argsort(lows[meets], kind="stable")
        starts = np.maximum.accumulate(np.append(0, highs[meets][order]))
        sizes = np.append(lows[meets][order], room) - starts
        sizes[sizes < nbytes] = room + 1
        best = int(sizes.argmin())
        return int(starts[best]) if sizes[best] <= room else -1

    def _take(self, nbytes: int, first: int, last: int, place: int) -> None:
        """Takes a place from one moment to another."""
        if self.count == self.taken.shape[1]:
            self.taken = np.concatenate([self.taken, np.zeros_like(self.taken)], axis=1)
        self.taken[:, self.count] = (first, last, place, place + nbytes)
        self.count += 1
        self.used[first : last + 1] += nbytes
