"""The entries of a table of stage costs, requested in rounds: a cost takes a solve, its lower bound takes hardly any
time.

A round requests the entries that some partition with a low bound may have, until no partition with another entry can
beat the best one known. Once the cost of an entry is known, it replaces the entry's bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from passes.inter_op.choices import Candidate, LowerBound, Places, StageTable, Submesh
from passes.inter_op.costs import Entry, Floats
from passes.inter_op.dynamic_program import bounds_with
from passes.inter_op.search import CLOSE

LowerBoundOf = Callable[[int, int, Submesh, int], LowerBound]
Prefetch = Callable[[Sequence[tuple[int, int, Submesh, int]], float], None]

_WIDER = 1.02
"""Entries whose bounds lie within this factor of the lowest are requested together: one at a time would leave other
processes idle, and all at once would price entries that are never needed.
"""


@dataclass(slots=True, kw_only=True)
class Requests:
    """The entries requested from a table so far: `known` maps a number of microbatches to them, None for no such stage.

    `chained`: the whole backward of a stage belongs to its chain, as no schedule splits it.
    """

    places: Places
    table: StageTable
    entries: tuple[Entry, ...]
    n_layers: int
    memory_limit: float
    chained: bool
    lower_bound: LowerBoundOf | None
    prefetch: Prefetch | None
    known: dict[int, dict[Entry, Candidate | None]]

    def ask(self, seconds: float) -> bool:
        """Requests the entries that a partition of less than `seconds` may need next; False if there are none."""
        bounds = {m: self._bounds(m) for m in self.known}
        missing = [(m, e, float(bounds[m][e])) for m in bounds for e in self.entries if e not in self.known[m]]
        lowest = min((bound for _, _, bound in missing), default=math.inf)
        if not missing or (math.isfinite(seconds) and lowest >= seconds * CLOSE):
            return False
        requested = [(m, entry) for m, entry, bound in missing if bound <= lowest * _WIDER]
        runs = [(first, last, self.places.choices[choice], m) for m, (choice, first, last) in requested]
        if self.prefetch is not None:
            self.prefetch(runs, seconds)
        for (m, entry), run in zip(requested, runs, strict=True):
            self.known[m][entry] = self.table.candidate(*run, seconds / m)  # its step takes m periods or more
        return True

    def _bounds(self, m: int) -> Floats:
        """A lower bound on the step of every partition that has a given entry."""
        busy, periods = np.full((2, len(self.places.choices), self.n_layers, self.n_layers + 1), math.inf)
        for entry in self.entries:
            busy[entry], periods[entry] = self._bound(m, entry)
        if self.lower_bound is None:
            return busy
        none = np.where(np.isfinite(busy), 0.0, math.inf)
        latencies = busy if self.chained else none
        return np.maximum(bounds_with(m * busy, latencies, self.places), bounds_with(m * periods, none, self.places))

    def _bound(self, m: int, entry: Entry) -> tuple[float, float]:
        """The least seconds of a microbatch on an entry, and its least period; infinite where none fits.

        They are exact once the cost of the entry is known.
        """
        if self.lower_bound is None:
            return 0.0, 0.0
        if entry in self.known[m]:
            candidate = self.known[m][entry]
            if not candidate or candidate.needed_nbytes(1) > self.memory_limit:
                return math.inf, math.inf
            return candidate.forward_seconds + candidate.backward_seconds, candidate.period(m)
        choice, first, last = entry
        bound = self.lower_bound(first, last, self.places.choices[choice], m)
        return (bound.seconds, bound.period) if bound.nbytes <= self.memory_limit else (math.inf, math.inf)
