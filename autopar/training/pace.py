"""The time that each process takes for a step by itself, and processes that take more than they should.

Steps end on all processes together, as they wait for each other. What one of them takes by itself is measured
separately: how long it does not call the next step though the last one has ended, and how long its devices compute.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.checks import hlo_kinds
from autopar.profiling import COMPUTE, Event, covered_seconds

_NOTABLE = 0.1
"""The share of a step's seconds from which the excess of a process is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of a step of one process: all, those between steps, and those in which its devices compute, as measured
    and by the plan.
    """

    step: float
    host: float
    compute: float
    planned: float

    @property
    def alone(self) -> float:
        """Seconds in which the process waits for no other."""
        return self.host + self.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A process that takes longer than the `due` seconds that its share of the plan takes at the pace of the others."""

    rank: int
    pace: Pace
    due: float

    @property
    def ratio(self) -> float:
        return self.pace.alone / self.due if self.due else math.inf


def stragglers(paces: Sequence[Pace], limit: float) -> list[Straggler]:
    """The processes, by rank, that take more than `limit` times their due seconds, if that is a notable part of a step.

    The plan says how the work is shared; the median process says how fast it goes here.
    """
    planned = [pace.planned for pace in paces]
    weights = planned if all(planned) else [1.0] * len(paces)
    usual = statistics.median_low([pace.alone / weight for pace, weight in zip(paces, weights, strict=True)])
    late: list[Straggler] = []
    for rank, (pace, weight) in enumerate(zip(paces, weights, strict=True)):
        due = usual * weight
        if pace.alone > limit * due and pace.alone - due > _NOTABLE * pace.step:
            late.append(Straggler(rank=rank, pace=pace, due=due))
    return late


def compute_seconds(events: Sequence[Event], devices: int) -> float:
    """Seconds in which a device of this process computes, on average, from what the profiler has seen."""
    by_device: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if hlo_kinds.kind_of(event.name) == COMPUTE and event.module:
            by_device.setdefault(event.device, []).append((event.start, event.end))
    return sum(map(covered_seconds, by_device.values())) / devices


def planned_seconds(shares: Sequence[tuple[int, Mapping[str, float]]], ranks: Sequence[int], rank: int) -> float:
    """The seconds in which a device of a process computes, on average, as a plan has it.

    `shares` are (devices, seconds by cause) of its submeshes, and `ranks` the process of each device.
    """
    seconds = [by_cause.get(COMPUTE, 0.0) for count, by_cause in shares for _ in range(count)]
    mine = [spent for spent, process in zip(seconds, ranks, strict=True) if process == rank]
    return sum(mine) / len(mine) if mine else 0.0
