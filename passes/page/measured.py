"""Steps as they were measured, beside a plan on its page: seconds by cause, and of a pipeline when each task ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from passes.errors import PlanningError, explain
from passes.inter_op import Timeline
from passes.plan import AnyPlan
from passes.plan import json as plan_json

REST = "rest"
"""The kind of what a submesh runs once a step, before its tasks and after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpan:
    """The start and end of a task on the devices of a submesh, `group`, in seconds from the start of the step.

    Of what is run once a step the `kind` is `REST`, and there is no microbatch: -1.
    """

    group: int
    stage: int
    microbatch: int
    kind: str
    start_seconds: float
    end_seconds: float

    def to_json(self) -> list[object]:
        """The span as a list of its fields."""
        return [self.group, self.stage, self.microbatch, self.kind, self.start_seconds, self.end_seconds]

    @classmethod
    def from_json(cls, data: object, where: str) -> Self:
        """The span that `to_json` described. Raises PlanningError for anything else."""
        entries, expected = plan_json.as_list(data, where), len(fields(cls))
        if len(entries) != expected:
            raise PlanningError(f"{where} has {len(entries)} entries, and a span has {expected}")
        group, stage, microbatch = (plan_json.as_int(value, where) for value in entries[:3])
        start, end = (plan_json.as_float(value, where) for value in entries[4:])
        return cls(
            group=group,
            stage=stage,
            microbatch=microbatch,
            kind=plan_json.as_text(entries[3], where),
            start_seconds=start,
            end_seconds=end,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan's steps as they were measured: the median step, and what a profile saw, by submesh.

    `shares` are seconds of a device by cause, and `spans` those of one step's tasks; both are empty without a profile.
    `program` and `shape` are the plan's.
    """

    program: str
    shape: str
    step_seconds: float
    shares: tuple[Mapping[str, float], ...] = ()
    spans: tuple[MeasuredSpan, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Self:
        """The steps in a file that `StepReport.write` wrote. Raises PlanningError for another file."""
        remedy = "name the file that train_step.report(state, batch).write(path) wrote"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            rule = f"it cannot be read as JSON: {error}"
            raise PlanningError(explain(str(path), rule, "", remedy)) from error
        read = plan_json.as_object(data, str(path))
        if "measured" not in read.data:
            raise PlanningError(explain(str(path), "it has no measured steps", "", remedy))
        shares = [plan_json.as_object(entry, read.place("measured")) for entry in read.list("measured")]
        return cls(
            program=read.text("program"),
            shape=read.text("shape"),
            step_seconds=read.float("step_seconds"),
            shares=tuple({name: share.float(name) for name in share.data if name != "devices"} for share in shares),
            spans=tuple(
                MeasuredSpan.from_json(entry, read.place(f"spans[{i}]")) for i, entry in enumerate(read.list("spans"))
            ),
        )

    def check(self, plan: AnyPlan) -> None:
        """Raises PlanningError unless these are steps of that plan."""
        theirs, ours = (self.program, self.shape), (plan.fingerprint, plan.shape)
        remedy = "measure a step of this plan: train_step.report(state, batch).write(path)"
        if theirs != ours:
            rule = "they are of program {} on {}, and the plan is of {} on {}".format(*theirs, *ours)
            raise PlanningError(explain("measured steps", rule, "", remedy))
        kinds = kinds_of(plan.timeline) if plan.timeline else []
        if plan.timeline and (others := sorted({span.kind for span in self.spans}.difference(kinds))):
            rule = f"they have tasks of kind {others[0]!r}, and the plan's schedule has {', '.join(kinds)}"
            raise PlanningError(explain("measured steps", rule, "", remedy))


def kinds_of(timeline: Timeline) -> list[str]:
    """The kinds of what a pipeline's submeshes run, in the order in which its page numbers them."""
    return [*sorted({span.task.kind for span in timeline.spans}), REST]


def measured_rows(spans: Sequence[MeasuredSpan], kinds: Sequence[str]) -> list[list[object]]:
    """The spans as the page reads them: `[group, stage, microbatch, kind, start, end]`, the kind by its place in
    `kinds_of` the plan.
    """
    return [[*span.to_json()[:3], kinds.index(span.kind), *span.to_json()[4:]] for span in spans]
