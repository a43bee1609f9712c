"""The inter-operator search: layers x submeshes -> stages, as a pure function of a table of stage costs.

Stages are consecutive layers on consecutive devices: a submesh never straddles two hosts unless it is made of whole
ones. With p stages, m microbatches, and for stage i the chain seconds c_i (forward, and the backward that the stage
before waits for), the busy seconds t_i >= c_i of a microbatch, the finish seconds f_i and the transfers h_i (there and
back) to the next one, a step takes about

    sum of (c_i + h_i) + (m - 1) period,    period = max of (t_i + f_i / m)                               (1)

and, whatever the schedule, at least (with forward seconds F_i and onward transfers x_i)

    max over i of  sum over j < i of (c_j + h_j) + m c_i + f_0                                            (2)
    max over i of  sum over j < i of (F_j + x_j) + m t_i + f_i                                            (3)

1. `passes.inter_op.dynamic_program` minimises the sum in (1) for one period and every number of stages;
   `search_by_period` does so for periods a factor of 1 + `EPSILON` apart, and ends where m periods reach the best.
2. Every partition found is simulated, unless a bound shows that it is no better, and the fastest is kept: the result is
   never slower, as simulated, than any partition compared, one stage on all devices among them.
3. Where the caller has a `lower_bound` on the cost of stages, entries of the table are requested in rounds, until no
   partition with another entry can beat the best found (`passes.inter_op.requests`).
4. `branch_and_bound` goes through all partitions in the order of their bounds (2) and (3): if it comes to the end the
   result is optimal, and otherwise the least bound that is left is the bound of the result.

Reference: Zheng et al., Alpa (2201.12023), section 5, equations 2 to 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from passes.errors import PlanningError, explain
from passes.inter_op.choices import Partition, Places, StageTable, Submesh, place
from passes.inter_op.costs import Problem, boundary_seconds, entries, tabulate, with_bounds
from passes.inter_op.requests import LowerBoundOf, Prefetch, Requests
from passes.inter_op.schedule_registry import is_chunked, splits_backward
from passes.inter_op.search import Incumbent, branch_and_bound, search_by_period, search_single_stages
from passes.progress import SearchContext

MOST_EXTENDED = 2000
"""Partial partitions that the branch and bound at the end extends: work, about a second of one processor. It proves
small problems optimal and leaves large ones a bound. `python -m benchmarks.settings` shows what half and double do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The partitions that a search chooses from: stages made of `n_layers` layers, on devices of one kind.

    Stages take devices of `whole`, which begins at the start of a host, in the shapes of `choices`; with `idle`, some
    devices may stay unused. `n_stages` are the numbers of stages allowed, by default all. A device has `memory_limit`
    bytes; each task takes `dispatch_seconds` more than its work, and a device computes during the share `overlap` of
    what it sends.
    """

    n_layers: int
    whole: Submesh
    choices: Sequence[Submesh]
    n_stages: Sequence[int] | None = None
    idle: bool = True
    schedules: Sequence[str] = ("gpipe", "1f1b")
    microbatches: Sequence[int] = (1,)
    memory_limit: float = math.inf
    dispatch_seconds: float = 0.0
    overlap: float = 1.0

    def places(self) -> Places:
        """The places that stages may have. Raises PlanningError where there are none."""
        return place(self.whole, self.choices, self.idle)

    def stage_counts(self) -> tuple[int, ...]:
        """The numbers of stages to try. Raises PlanningError for numbers below 1 or too many stages, and for chunked
        schedules.
        """
        for m in self.microbatches or [0]:
            if m < 1:
                argument = f"microbatches={m}" if self.microbatches else "microbatches=()"
                raise PlanningError(explain(argument, "a step has at least 1 microbatch", "", "give numbers from 1"))
        if not self.schedules:
            raise PlanningError(explain("schedules=()", "stages need a schedule", "", "name one, such as '1f1b'"))
        for name in self.schedules:
            if is_chunked(name):
                rule = "puts several stages on a device group, and the search gives each its own"
                raise PlanningError(explain(f"schedule {name!r}", rule, "", "try '1f1b', or plan it by hand"))
        numbers = range(1, self.n_layers + 1) if self.n_stages is None else self.n_stages
        for number in numbers or [0]:
            if not 1 <= number <= self.n_layers:
                rule = f"each needs a layer, and there are {self.n_layers}"
                rule = rule if number > 0 else "a plan has at least 1 stage"
                remedy = f"ask for {self.n_layers} or fewer" if self.n_layers > 1 else "ask for 1"
                raise PlanningError(explain(f"n_stages={number}", rule, "", remedy))
        return tuple(sorted(set(numbers)))

    def by_backward(self) -> dict[bool, tuple[str, ...]]:
        """The schedules that run a backward whole (False), and those that split it (True)."""
        splits = {name: splits_backward(name) for name in self.schedules}
        return {kind: tuple(name for name in splits if splits[name] == kind) for kind in splits.values()}


def partition(
    space: Space,
    table: StageTable,
    *,
    lower_bound: LowerBoundOf | None = None,
    prefetch: Prefetch | None = None,
    most_extended: int = MOST_EXTENDED,
    context: SearchContext | None = None,
) -> Partition | None:
    """The partition with the shortest simulated step; None where none fits, or is below the cutoff of the `context`.

    `table` has the costs of stages. `lower_bound` bounds the cost of any of them; without it every entry is requested.
    `prefetch` is called with the entries that are requested next, and the seconds that a step must stay below. The
    branch and bound at the end extends at most `most_extended` partial partitions. Raises PlanningError for a space
    without partitions, and for chunked schedules.
    """
    context = context or SearchContext()
    places = space.places()
    numbers = tuple(p for p in space.stage_counts() if p <= places.n_slots)
    kinds = space.by_backward()
    incumbent = Incumbent(
        places=places, dispatch_seconds=space.dispatch_seconds, overlap=space.overlap, seconds=context.cutoff
    )
    hops = {m: boundary_seconds(space.n_layers, places, table, m) for m in dict.fromkeys(space.microbatches)}
    requests = Requests(
        places=places,
        table=table,
        entries=tuple(entries(space.n_layers, places, numbers)),
        memory_limit=space.memory_limit,
        chained=True not in kinds,
        lower_bound=lower_bound,
        prefetch=prefetch,
        known={m: {} for m in hops},
        n_layers=space.n_layers,
    )

    def problems_so_far() -> Iterator[Problem]:
        """The problems of the costs known so far, for each number of microbatches with the backward whole or split."""
        for m, (split, names) in product(hops, kinds.items()):
            costs = tabulate(
                requests.known[m],
                hops[m],
                m,
                split=split,
                dispatch_seconds=space.dispatch_seconds,
                memory_limit=space.memory_limit,
            )
            yield with_bounds(places, costs, m, names, numbers)

    problems = _searched(requests, problems_so_far, incumbent, context)
    incumbent.entries = sum(map(len, requests.known.values()))
    bound = 0.0 if context.is_interrupted else branch_and_bound(problems, incumbent, most_extended)
    return None if incumbent.best is None else incumbent.answer(bound)


def _searched(
    requests: Requests,
    problems_so_far: Callable[[], Iterable[Problem]],
    incumbent: Incumbent,
    context: SearchContext,
) -> list[Problem]:
    """The problems once no further entries are needed, or once the search was interrupted with a partition found."""
    problems: list[Problem] = []
    with context.ending_early():
        while requests.ask(incumbent.seconds):
            problems = sorted(problems_so_far(), key=lambda problem: problem.least_seconds)
            for problem in problems:
                search_single_stages(problem, incumbent)
            for problem in problems:
                search_by_period(problem, incumbent)
    if incumbent.best is None:
        context.raise_if_interrupted()
    return problems
