"""The error of a search over stages in which no partition fits: it names the one that needs the least memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from passes.errors import OverBudgetError, explain
from passes.inter_op.choices import Places
from passes.inter_op.costs import CostArrays, Entry, Problem
from passes.inter_op.dynamic_program import Stages, levels, trace
from passes.text import count, quantities


def infeasible_error(problems: Sequence[Problem], places: Places, memory_limit: float) -> OverBudgetError:
    """The error that names the partition of least memory, by the bytes of its largest stage."""
    closest = min(
        (each for problem in problems for each in _of_least_memory(problem, places)),
        key=lambda each: each.nbytes,
        default=None,
    )
    if closest is None:
        rule = "no stages that cover the layers and the devices can be had"
        return OverBudgetError(explain("the table of stages", rule, "", "allow more submeshes, idle devices or stages"))
    limit = f"memory_limit={memory_limit:.0f} bytes ({quantities.nbytes(memory_limit)})"
    remedy = "give more memory or devices, more microbatches, or a schedule with fewer of them in flight"
    return OverBudgetError(explain(limit, "no partition fits", closest.in_words(places), remedy))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closest:
    """A partition that does not fit: its `largest` stage needs `nbytes` with `in_flight` microbatches in flight."""

    problem: Problem
    schedule: str
    stages: Sequence[Entry]
    largest: int
    nbytes: float
    in_flight: int

    def in_words(self, places: Places) -> str:
        microbatches = count(self.problem.microbatches, "microbatch", "microbatches")
        choice, first, last = self.stages[self.largest]
        return (
            f"closest is {self.schedule} of {microbatches}: stage {self.largest} of {len(self.stages)}, "
            f"layers {first} to {last - 1} on {places.choices[choice]}, needs {self.nbytes:.0f} bytes "
            f"({quantities.nbytes(self.nbytes)}) with {count(self.in_flight, 'microbatch', 'microbatches')} in flight"
        )


def _of_least_memory(problem: Problem, places: Places) -> Iterator[_Closest]:
    """The partition of least memory under each schedule with each number of stages."""
    costs = problem.costs
    for counts, names in problem.schedule_groups(np.arange(0.0)).items():
        needs = {level: _needed(costs, in_flight) for level, in_flight in enumerate(counts, 1)}
        program = (needs.__getitem__, np.zeros_like(costs.onward), places, np.maximum)
        tables = levels(*program, len(counts), np.full((problem.n_layers + 1, len(places.final)), math.inf))
        for n_stages, level in enumerate(tables, 1):
            if n_stages in names and math.isfinite(level[:, 0, 0].min()):
                stages = trace(*program, tables[:n_stages])
                sizes = [float(needs[n_stages - at].values[entry]) for at, entry in enumerate(stages)]
                largest = sizes.index(max(sizes))
                yield _Closest(
                    problem=problem,
                    schedule=names[n_stages][0],
                    stages=stages,
                    largest=largest,
                    nbytes=sizes[largest],
                    in_flight=int(counts[n_stages - largest - 1]),
                )


def _needed(costs: CostArrays, in_flight: float) -> Stages:
    """The bytes of every stage [choices, layers, layers + 1] with this many microbatches in flight."""
    return Stages.of(costs.base_nbytes + in_flight * costs.in_flight_nbytes)
