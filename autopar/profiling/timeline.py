"""The measured tasks of a pipeline: the start and end of each on the devices of its submesh, from a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.profiling.events import Event
from passes.inter_op import Task
from passes.page import REST, MeasuredSpan

SECOND_NANOSECONDS = 1e9
"""Nanoseconds in a second: profiles count in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A program that a submesh (`group`) runs in each step: its module, and the names of its instructions.

    `task` is None for a program that runs once a step.
    """

    group: int
    stage: int
    module: str
    instructions: frozenset[str]
    task: Task | None


def measured_spans(
    seen: Iterable[Event], runs: Sequence[Run], groups: Sequence[Sequence[int]], steps: int, step: int
) -> tuple[MeasuredSpan, ...]:
    """The spans of step number `step` of `steps` equal ones, by start; empty if the profile does not tell runs apart.

    `runs` are those of a step in the order in which they are issued, and `groups` the numbers of each submesh's
    devices. A device runs them in that order, so of an instruction that is in n of them, every n-th event belongs to
    one.
    """
    by_name: dict[tuple[int, str, str], list[Event]] = {}
    for event in seen:
        by_name.setdefault((event.device, event.module, event.name), []).append(event)
    ends: dict[int, tuple[float, float]] = {}
    for group, devices in enumerate(groups):
        for device in devices:
            for number, start, end in _on_device(by_name, runs, group, device, steps, step):
                before = ends.get(number, (start, end))
                ends[number] = min(before[0], start), max(before[1], end)
    if any(number not in ends for number, run in enumerate(runs) if run.task):
        return ()
    begin = min(start for start, _ in ends.values()) if ends else 0.0
    spans = [_span(runs[number], start - begin, end - begin) for number, (start, end) in ends.items()]
    return tuple(sorted(spans, key=lambda span: (span.start_seconds, span.group)))


def _on_device(
    by_name: Mapping[tuple[int, str, str], list[Event]],
    runs: Sequence[Run],
    group: int,
    device: int,
    steps: int,
    step: int,
) -> Iterator[tuple[int, float, float]]:
    """(number of the run, start, end) of what each instruction of a step did on a device."""
    holders: dict[tuple[str, str], list[int]] = {}
    for number, run in enumerate(runs):
        if run.group == group:
            for name in run.instructions:
                holders.setdefault((run.module, name), []).append(number)
    for (module, name), numbers in holders.items():
        events = sorted(by_name.get((device, module, name), ()), key=lambda event: event.start)
        each, rest = divmod(len(events), len(numbers) * steps)
        if rest or not each:  # a branch that was not always taken, or no operator of its own
            continue
        for at, number in enumerate(numbers):
            first = (step * len(numbers) + at) * each
            of_run = events[first : first + each]
            yield number, of_run[0].start, max(event.end for event in of_run)


def _span(run: Run, start: float, end: float) -> MeasuredSpan:
    return MeasuredSpan(
        group=run.group,
        stage=run.stage,
        microbatch=run.task.microbatch if run.task else -1,
        kind=run.task.kind if run.task else REST,
        start_seconds=start / SECOND_NANOSECONDS,
        end_seconds=end / SECOND_NANOSECONDS,
    )
