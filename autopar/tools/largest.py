"""The largest batch and the largest preset with which plans fit in memory: double, bisect, plan anew at every size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.rewrite import TracedStep
from autopar.tools.fit import PLANNERS, Announce, Example, Room, Row, RowPlanner, batch_of, quiet, traced_step
from passes.errors import PlanningError
from passes.intra_op import MOST_OPERATORS, VariantTrials, cheapest_variant
from passes.limits import Limits
from passes.plan import Plan
from passes.progress import Deadline, Progress, SearchContext

MOST_PLANS = 8
"""Plans of one planner in search of its largest batch or preset, where no seconds are given: most need 4 to 7."""


class _OutOfTime(Exception):
    """Raised where a search has no time left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest batch or preset that fits under one planner, None if none does; not `certain` if the search was given
    up.
    """

    name: str
    what: Literal["batch", "preset"]
    size: int | str | None = None
    certain: bool = False
    row: Row | None = None
    refusal: str = ""

    def to_json(self) -> dict[str, object]:
        """The answer as JSON data."""
        row = self.row.to_json() if self.row else {}
        refusal = {"refusal": self.refusal} if self.refusal else {}
        return {"what": self.what, "size": self.size, "certain": self.certain, **row, "plan": self.name, **refusal}


def _tried(step: TracedStep, room: Room, on_plan: Announce) -> Plan:
    """The plan of `_searched`, with as much work for all plans as that has for one.

    There are no seconds beyond the room's: raises _OutOfTime when they are over. An error says nothing of other
    clusters.
    """
    end = Deadline(room.seconds)

    def report(progress: Progress) -> None:
        if end.is_over():
            raise _OutOfTime

    trials = VariantTrials(
        step=step,
        limits=Limits.equal(room.limit_nbytes),
        most=MOST_OPERATORS // MOST_PLANS,
        search=lambda variant, offload, most_nbytes, part: room.auto.mesh_search(
            variant, room.cluster, part, offload, most_nbytes
        ),
        context=SearchContext(report=report, deadline=end),
    )
    return cheapest_variant(trials)


STRETCHED: dict[str, RowPlanner] = {
    name: _tried if name == "searched" else PLANNERS[name] for name in ("data parallel", "ZeRO-3", "searched")
}
"""The planners whose largest batch and preset are looked for."""

_SHARES = {"searched": 3}
"""The shares of the time that planners get, one for each that is not here."""


def largest(
    example: Example,
    step: TracedStep,
    room: Room,
    rows: Sequence[Row],
    presets: Mapping[str, Callable[[], Example]],
    announce: Announce = quiet,
) -> Iterator[Largest]:
    """The largest batch, and the largest of `presets` (smallest first), under some planners; `room.seconds` are for
    all.

    `rows` are those of the example as it is.
    """
    end = Deadline(room.seconds)
    turns = [(name, what) for what in ("batch", "preset")[: 1 + bool(presets)] for name in STRETCHED]
    known = {row.name: row for row in rows}
    for turn, (name, what) in enumerate(turns):
        shares_left = sum(_SHARES.get(other, 1) for other, _ in turns[turn:])
        until = Deadline(None if end.seconds_left is None else end.seconds_left * _SHARES.get(name, 1) / shares_left)
        if what == "preset":
            yield _largest_preset(name, presets, room, until, announce)
            continue
        try:
            yield _largest_batch(name, example, step, room, known.get(name), until, announce)
        except PlanningError as error:
            yield Largest(name=name, what="batch", refusal=str(error))


def _largest_batch(
    name: str, example: Example, step: TracedStep, room: Room, known: Row | None, end: Deadline, announce: Announce
) -> Largest:
    """The largest batch in multiples of the devices, and of microbatches; `known` is the row of the batch as it is."""
    unit = math.lcm(room.cluster.n_devices, step.chosen.microbatches or 1)
    batch = batch_of(step)
    given = step.structs[batch[0]].shape[0]

    def planned(multiple: int) -> Row:
        if known is not None and multiple * unit == given:
            return known
        announce(f"planning {name} for a batch of {multiple * unit:,}")
        rows = dict.fromkeys(batch, multiple * unit)
        return _stretched(name, lambda: traced_step(example, rows, cluster=room.cluster), room, end, announce)

    reached = reach(planned, max(1, given // unit), end)
    return Largest(
        name=name,
        what="batch",
        size=reached.number * unit or None,
        certain=reached.certain,
        row=reached.row,
        refusal=reached.refusal,
    )


def _largest_preset(
    name: str, presets: Mapping[str, Callable[[], Example]], room: Room, end: Deadline, announce: Announce
) -> Largest:
    """The largest preset, if each needs more than those before it."""
    names = tuple(presets)

    def planned(number: int) -> Row:
        announce(f"planning {name} for preset {names[number - 1]}")
        return _stretched(
            name, lambda: traced_step(presets[names[number - 1]](), cluster=room.cluster), room, end, announce
        )

    reached = reach(planned, 1, end, len(names))
    return Largest(
        name=name,
        what="preset",
        size=names[reached.number - 1] if reached.number else None,
        certain=reached.certain,
        row=reached.row,
        refusal=reached.refusal,
    )


def _stretched(name: str, make: Callable[[], TracedStep], room: Room, end: Deadline, announce: Announce) -> Row:
    """A row for a step of another size. Raises PlanningError where the user's function takes no such size."""
    remaining = replace(room, seconds=end.seconds_left)
    try:
        step = make()
    except PlanningError:
        raise
    except Exception as error:
        raise PlanningError(f"the step cannot be traced at other sizes: {type(error).__name__}: {error}") from error
    try:
        return Row(name=name, limit_nbytes=room.limit_nbytes, plan=STRETCHED[name](step, remaining, announce))
    except PlanningError as error:
        return Row(name=name, limit_nbytes=room.limit_nbytes, refusal=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The largest `number` whose `row` fits, 0 if none does; `certain` that no larger one does, else maybe why not."""

    number: int = 0
    row: Row | None = None
    certain: bool = False
    refusal: str = ""


def reach(
    planned: Callable[[int], Row], start: int, end: Deadline, most: int | None = None, plans: int = MOST_PLANS
) -> Reached:
    """The largest number from 1 to `most` whose row fits.

    From `start` it doubles, then bisects, two of three times where a line through the peaks at both ends meets the
    limit: a hand-made plan's peak is nearly that. It gives up at `end`, or after so many `plans` if there is none, and
    where a number cannot be planned at all.
    """
    low, high = 0, most + 1 if most else None
    rows: dict[int, Row] = {}
    at, steps = start, 0
    while high is None or high - low > 1:
        if rows and (end.is_over() or (end.seconds_left is None and len(rows) >= plans)):
            return Reached(number=low, row=rows.get(low))
        try:
            rows[at] = planned(at)
        except _OutOfTime:
            return Reached(number=low, row=rows.get(low))
        except PlanningError as error:
            return Reached(number=low, row=rows.get(low), refusal=str(error))
        if rows[at].fits:
            low = at
        else:
            high = at
        at = 2 * low if high is None else _between(rows, low, high, by_line=steps % 3 < 2)
        steps += high is not None
    return Reached(number=low, row=rows.get(low), certain=True)


def _between(rows: Mapping[int, Row], low: int, high: int, *, by_line: bool) -> int:
    """The number to try next: where a line through the peaks at both ends meets the limit, or in the middle."""
    if by_line and all(n in rows and rows[n].plan for n in (low, high)):
        room, over = -rows[low].over_nbytes, rows[high].over_nbytes
        return min(max(low + 1, low + int((high - low) * room / (room + over))), high - 1)
    return (low + high) // 2


def presets_of(values: Mapping[str, Any], read: Callable[[Any], Example]) -> dict[str, Callable[[], Example]]:
    """Examples by name, each made when it is wanted; `read` tells what a value stands for."""

    def later(value: Any) -> Callable[[], Example]:
        return lambda: read(value() if callable(value) else value)

    return {name: later(value) for name, value in values.items()}
