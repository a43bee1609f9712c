"""The simulation of a schedule: from the seconds and bytes of its stages and transfers to a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from passes.errors import InternalError
from passes.inter_op.schedules import LETTERS, Kind, Schedule, Span, Task, in_flight, play
from passes.text import GAP, Column, Table, quantities

MICROSECONDS = 1e6
"""Microseconds in a second: traces are written in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of one stage: seconds of each kind of task for one microbatch, and bytes of one device.

    `finish_seconds` are spent once a step when all microbatches are done, on reducing gradients and applying updates.
    `in_flight_nbytes` are kept for every microbatch from its forward to its backward or weight gradient,
    `persistent_nbytes` all the time. `working_nbytes` are needed while a task runs, `finish_nbytes` at the end of a
    step, when nothing is in flight.
    """

    forward_seconds: float
    backward_seconds: float
    input_gradient_seconds: float | None = None
    weight_gradient_seconds: float | None = None
    finish_seconds: float = 0.0
    in_flight_nbytes: int = 0
    persistent_nbytes: int = 0
    working_nbytes: int = 0
    finish_nbytes: int = 0

    @classmethod
    def split(cls, forward_seconds: float, input_gradient_seconds: float, weight_gradient_seconds: float) -> Self:
        """The cost of a stage whose backward takes as long as its two halves together."""
        return cls(
            forward_seconds=forward_seconds,
            backward_seconds=input_gradient_seconds + weight_gradient_seconds,
            input_gradient_seconds=input_gradient_seconds,
            weight_gradient_seconds=weight_gradient_seconds,
        )

    def needed_nbytes(self, microbatches: int) -> int:
        """Bytes with that many microbatches in flight, while a task runs."""
        return self.persistent_nbytes + self.working_nbytes + microbatches * self.in_flight_nbytes

    def period(self, microbatches: int) -> float:
        """Seconds of one of `microbatches` microbatches, with its share of the end of a step."""
        return self.forward_seconds + self.backward_seconds + self.finish_seconds / microbatches

    def seconds(self, kind: Kind) -> float:
        """Seconds of one task. Raises InternalError for a half of the backward that has none."""
        match kind:
            case "forward":
                seconds = self.forward_seconds
            case "backward":
                seconds = self.backward_seconds
            case "input_gradient":
                seconds = self.input_gradient_seconds
            case "weight_gradient":
                seconds = self.weight_gradient_seconds
        if seconds is None:
            raise InternalError(f"a schedule splits the backward of a stage without {kind}_seconds")
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Seconds of one microbatch across a boundary of two stages: outputs forward, their gradients backward."""

    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The start and end of each task, in order of start, ties by stage; with totals per device group [groups].

    A group starts with its first task and is at its end when the last is done and the once-a-step `finish_seconds` are
    over; in between it is busy or waits. `peak_nbytes` are those of one of its devices.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    start_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]
    finish_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    peak_nbytes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return max(self.end_seconds)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks in an order in which they can be issued one at a time."""
        return tuple(span.task for span in self.spans)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the step that each group is idle."""
        return tuple(_idle(busy, self.seconds) for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """The share of the step that the groups are idle on average."""
        return _idle(sum(self.busy_seconds), self.seconds * len(self.busy_seconds))

    def table(self, width: int = 80) -> Table:
        """A table with one line of at most `width` characters for each device group, drawn to scale."""
        tails = [("bubble", [quantities.share(bubble, 1) for bubble in self.bubbles])]
        if any(self.peak_nbytes):
            tails.append(("peak", [quantities.nbytes(peak) for peak in self.peak_nbytes]))
        widths = [max(map(len, (heading, *cells))) for heading, cells in tails]
        chart = width - sum(len(GAP) + size for size in (len("group"), *widths)) - len(GAP)
        rows = self._draw(max(1, chart))
        columns = (Column(heading="group", right=True), Column(heading="time"))
        return Table(
            title=f"{self.schedule}: {quantities.seconds(self.seconds)}, bubble {quantities.share(self.bubble, 1)}",
            columns=(*columns, *(Column(heading=heading, right=True) for heading, _ in tails)),
            rows=tuple(zip(map(str, range(len(rows))), rows, *(cells for _, cells in tails), strict=True)),
            note=self._legend(),
        )

    def format(self, width: int = 80) -> str:
        """The timeline as plain text."""
        return self.table(width).format(width)

    def _legend(self) -> str:
        """The key to the letters in the drawing."""
        letters = [f"{LETTERS[kind]} {kind.replace('_', ' ')}" for kind in _kinds(self.schedule)]
        numbers = "F3/5, F3 or f of microbatch 3 on stage 5" if self.schedule.chunks > 1 else "F3 or f of microbatch 3"
        finish = ["= end of step"] if any(self.finish_seconds) else []
        return ", ".join((*letters, numbers, *finish, ". idle"))

    def _draw(self, width: int) -> list[str]:
        """A line of `width` characters for each group; each character shows what runs in the middle of its time."""
        scale = width / self.seconds if self.seconds else 0.0
        rows = [["."] * width for _ in self.schedule.groups]

        def draw(group: int, start: float, end: float, texts: Sequence[str], fill: str) -> None:
            first, last = (math.ceil(seconds * scale - 0.5) for seconds in (start, end))
            text = next((text for text in texts if len(text) <= last - first), "")
            rows[group][first:last] = text.ljust(last - first, fill)

        for span in self.spans:
            label = self.schedule.label(span.task)
            texts = (label, label.partition("/")[0], label[0].lower())
            draw(self.schedule.group_of(span.task.stage), span.start_seconds, span.end_seconds, texts, "-")
        for group, (end, finish) in enumerate(zip(self.end_seconds, self.finish_seconds, strict=True)):
            draw(group, end - finish, end, (), "=")
        return ["".join(row) for row in rows]

    def to_trace(self) -> list[dict[str, object]]:
        """The events of a Chrome or Perfetto trace, in microseconds, one track for each device group.

        Reference: Trace Event Format, complete events (`X`) and metadata (`M`).
        """
        names: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": group, "args": {"name": f"device group {group}"}}
            for group in range(len(self.schedule.groups))
        ]
        tasks = [
            _event(self.schedule.group_of(span.task.stage), str(span.task), span.start_seconds, span.end_seconds)
            | {"cat": span.task.kind, "args": {"stage": span.task.stage, "microbatch": span.task.microbatch}}
            for span in self.spans
        ]
        ends = [
            _event(group, "end of step", end - finish, end)
            for group, (end, finish) in enumerate(zip(self.end_seconds, self.finish_seconds, strict=True))
            if finish
        ]
        return [*names, *tasks, *ends]


def simulate(
    schedule: Schedule,
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] = (),
    *,
    dispatch_seconds: float = 0.0,
    overlap: float = 1.0,
) -> Timeline:
    """The timeline of a schedule with these costs of stages [stages] and of transfers between them [stages - 1].

    Every task takes `dispatch_seconds` more. A transfer delays the stage that receives, and the one that sends but for
    the share `overlap`; without `transfers` they take no time. Stages of one group need none.

    Raises PlanningError for a schedule that does not end, InternalError for costs that do not fit the schedule.
    """
    if len(stages) != schedule.n_stages or len(transfers) not in (0, schedule.n_stages - 1):
        raise InternalError(f"{len(stages)} stage costs and {len(transfers)} transfers for {schedule}")
    durations = {kind: [dispatch_seconds + stage.seconds(kind) for stage in stages] for kind in _kinds(schedule)}
    hops = hops_of(transfers if len(schedule.groups) > 1 else (), schedule.n_stages)
    spans = play(
        schedule,
        lambda task: durations[task.kind][task.stage],
        lambda task: hops[task.kind][task.stage],
        overlap=overlap,
    )
    groups = range(len(schedule.groups))
    starts, ends, busy = [math.inf] * len(groups), [0.0] * len(groups), [0.0] * len(groups)
    for span in spans:
        group = schedule.group_of(span.task.stage)
        starts[group] = min(starts[group], span.start_seconds)
        ends[group] = span.end_seconds
        busy[group] += durations[span.task.kind][span.task.stage]
    finish = [sum(stage.finish_seconds for stage in stages[group :: len(groups)]) for group in groups]
    nbytes = peaks(schedule, stages)
    return Timeline(
        schedule=schedule,
        spans=spans,
        start_seconds=tuple(starts),
        end_seconds=tuple(ends[group] + finish[group] for group in groups),
        finish_seconds=tuple(finish),
        busy_seconds=tuple(busy[group] + finish[group] for group in groups),
        peak_nbytes=tuple(sum(causes.values()) for causes in nbytes),
    )


def peaks(schedule: Schedule, stages: Sequence[StageCost]) -> tuple[dict[str, int], ...]:
    """Peak bytes of a device of each group [groups] by cause: while tasks run or, if more, at the end of the step."""
    return peaks_of(in_flight(schedule, [stage.in_flight_nbytes for stage in stages]), stages)


def peaks_of(saved: Sequence[int], stages: Sequence[StageCost]) -> tuple[dict[str, int], ...]:
    """The peak bytes of `peaks` for stages whose microbatches in flight keep `saved` bytes on each group [groups]."""
    by_cause: list[dict[str, int]] = []
    for group, saved_nbytes in enumerate(saved):
        stages_of_group = stages[group :: len(saved)]
        working = max(stage.working_nbytes for stage in stages_of_group)
        finish = sum(stage.finish_nbytes for stage in stages_of_group)
        now = {"state, arguments and sums": sum(stage.persistent_nbytes for stage in stages_of_group)}
        if finish > saved_nbytes + working:
            by_cause.append({**now, "new state and its update": finish})
        else:
            by_cause.append({**now, "microbatches in flight": saved_nbytes, "working memory": working})
    return tuple(by_cause)


def _kinds(schedule: Schedule) -> list[Kind]:
    """The kinds of task in a schedule."""
    kinds = {task.kind for tasks in schedule.groups for task in tasks}
    return [kind for kind in LETTERS if kind in kinds]


def hops_of(transfers: Sequence[Transfer], n_stages: int) -> dict[Kind, list[float]]:
    """Seconds from the end of a task of each kind to the arrival of its result on the neighbouring stage [stages]."""
    if not transfers:
        nothing = [0.0] * n_stages
        return dict.fromkeys(LETTERS, nothing)
    onward = [*(transfer.forward_seconds for transfer in transfers), 0.0]
    back = [0.0, *(transfer.backward_seconds for transfer in transfers)]
    return {"forward": onward, "backward": back, "input_gradient": back, "weight_gradient": [0.0] * n_stages}


def _idle(busy: float, total: float) -> float:
    """The share of the time that is not busy."""
    return max(0.0, 1 - busy / total) if total else 0.0


def _event(group: int, name: str, start: float, end: float) -> dict[str, object]:
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"ph": "X", "name": name, "pid": 0, "tid": group, **times}
