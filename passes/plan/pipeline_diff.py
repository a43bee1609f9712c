"""What changed between two plans, one or both of them pipelines: words, the step's seconds and bytes, each stage."""

from __future__ import annotations

from dataclasses import dataclass

from passes.plan.diff import Amount, Change, PlanDiff, amounts, changes
from passes.plan.pipeline import PipelinePlan
from passes.plan.plan import Plan
from passes.text import Column, Table, quantities


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDiff:
    """Everything that differs, empty where nothing does.

    `seconds` are of a step, `nbytes` of the fullest device; `stages` has a difference for every stage, and none where
    the plans have other numbers of stages.
    """

    words: tuple[Change, ...]
    seconds: tuple[Amount, ...]
    nbytes: tuple[Amount, ...]
    stages: tuple[PlanDiff, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans place and predict the same."""
        return not (self.words or self.seconds or self.nbytes) and all(stage.is_empty for stage in self.stages)

    def tables(self) -> tuple[Table, ...]:
        """What differs of the whole, then of every stage that differs."""
        rows_of_words = tuple((c.name, c.before, c.after) for c in self.words)
        numbers = [(amount, quantities.seconds) for amount in self.seconds] + [
            (amount, quantities.nbytes) for amount in self.nbytes
        ]
        rows = rows_of_words + tuple((amount.name, text(amount.before), text(amount.after)) for amount, text in numbers)
        columns = (Column(heading=""), Column(heading="before", flexible=True), Column(heading="after", flexible=True))
        all_tables = [Table(title="plan", columns=columns, rows=rows)] if rows else []
        for number, stage in enumerate(self.stages):
            all_tables.extend(
                Table(title=f"stage {number}: {table.title}", columns=table.columns, rows=table.rows, note=table.note)
                for table in stage.tables()
            )
        return tuple(all_tables)

    def format(self, *, width: int = 80) -> str:
        """The differences as text."""
        return "\n\n".join(table.format(width) for table in self.tables()) or "no difference"

    def to_json(self) -> dict[str, object]:
        """The differences as plain data; seconds and bytes are numbers."""
        parts = {"words": self.words, "seconds": self.seconds, "nbytes": self.nbytes}
        fields: dict[str, object] = {name: [_fields(change) for change in part] for name, part in parts.items()}
        return fields | {"stages": [stage.to_json() for stage in self.stages]}

    def __str__(self) -> str:
        return self.format()


def differences(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> PlanDiff | PipelineDiff:
    """The differences between two plans, either of which may be a pipeline."""
    if isinstance(before, Plan) and isinstance(after, Plan):
        return before.diff(after)
    olds, news = _words(before), _words(after)
    names = dict.fromkeys((*olds, *news))
    first, second = _stages(before), _stages(after)
    alike = len(first) == len(second)
    return PipelineDiff(
        words=changes({name: (olds.get(name, "none"), news.get(name, "none")) for name in names}),
        seconds=amounts({"step": before.step_seconds}, {"step": after.step_seconds}),
        nbytes=amounts({"peak": before.peak_nbytes}, {"peak": after.peak_nbytes}),
        stages=tuple(a.diff(b) for a, b in zip(first, second, strict=True)) if alike else (),
    )


def _stages(plan: Plan | PipelinePlan) -> tuple[Plan, ...]:
    return plan.stages if isinstance(plan, PipelinePlan) else ()


def _words(plan: Plan | PipelinePlan) -> dict[str, str]:
    common = {"program": plan.fingerprint, "cluster": plan.cluster.name, "microbatches": f"{plan.microbatches:,}"}
    if isinstance(plan, Plan):
        return {**common, "planner": plan.solution.planner, "stages": "none", "mesh": str(plan.mesh)}
    return {
        **common,
        "planner": plan.planner,
        "stages": f"{len(plan.stages)}",
        "mesh": "; ".join(str(stage.mesh) for stage in plan.stages[: plan.groups]),
        "schedule": plan.schedule_name,
        "chunks": f"{plan.chunks}",
        "cut before": ", ".join(f"node {first}" for first in plan.firsts[1:]),
        "bubble": f"{plan.bubble:.1%}",
    }


def _fields(change: Change | Amount) -> dict[str, object]:
    return {"name": change.name, "before": change.before, "after": change.after}
