"""The differences between two plans of which one or both are pipelines: facts, the step's seconds and bytes, each
stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from passes.plan.diff import Amount, Change, PlanDiff, amounts, changes
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

    @classmethod
    def between(
        cls,
        facts: tuple[Mapping[str, str], Mapping[str, str]],
        seconds: tuple[float, float],
        nbytes: tuple[float, float],
        stages: Sequence[PlanDiff],
    ) -> Self:
        """The differences of two plans; each pair has the facts, the step's seconds and bytes."""
        before, after = facts
        names = dict.fromkeys((*before, *after))
        return cls(
            words=changes({name: (before.get(name, "none"), after.get(name, "none")) for name in names}),
            seconds=amounts({"step": seconds[0]}, {"step": seconds[1]}),
            nbytes=amounts({"peak": nbytes[0]}, {"peak": nbytes[1]}),
            stages=tuple(stages),
        )

    @property
    def is_empty(self) -> bool:
        """Whether the plans place and predict the same."""
        return not (self.words or self.seconds or self.nbytes) and all(stage.is_empty for stage in self.stages)

    def tables(self) -> tuple[Table, ...]:
        """Tables of what differs of the whole, then of every stage that differs."""
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


def _fields(change: Change | Amount) -> dict[str, object]:
    return {"name": change.name, "before": change.before, "after": change.after}
