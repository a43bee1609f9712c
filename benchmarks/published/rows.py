"""A row of a published table: what was measured, and the question whose answer is held against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

GIB = 2**30

Fields = Mapping[str, str]
"""One line of a CSV file, by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """autopar's prediction: seconds of a step, peak bytes of a device, and the bytes that a plan may need at most."""

    seconds: float | None = None
    nbytes: float | None = None
    limit_nbytes: float | None = None

    @property
    def is_out_of_memory(self) -> bool | None:
        """Whether a device needs more memory than it may; None where memory is not predicted."""
        return None if self.nbytes is None or self.limit_nbytes is None else self.nbytes > self.limit_nbytes


class Question(Protocol):
    """Something that autopar predicts; equal questions have equal answers."""

    def answer(self) -> Answer:
        """The prediction. Raises PlanningError where there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: seconds of a step, peak bytes of a device, whether it ran out of memory; None where not given.

    The rate that the source prints is `work / seconds`, in `unit`. Rows of a `sweep` differ in one thing; where that is
    the configuration of one job, the sweep `is_choice`. Where the source prints throughput relative to another row of
    the sweep, that row is the `base`, and `seconds` are in its steps. Some number of autopar or of the source's cluster
    was set by `fitted` rows; the others judge predictions. `rounding` is the share by which a prediction of a figure
    that the source computes may differ from it, 0 for measured ones. A row without a `question` has the reason in
    `why`.
    """

    source: str
    sweep: str
    name: str
    question: Question | None = None
    why: str = ""
    seconds: float | None = None
    nbytes: float | None = None
    out_of_memory: bool | None = None
    work: float = 1.0
    unit: str = "steps/s"
    base: str = ""
    is_choice: bool = False
    fitted: bool = False
    rounding: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A row with its prediction; `answer` is None where there is none, with the reason in `why`."""

    row: Row
    answer: Answer | None = None
    why: str = ""

    @property
    def seconds_ratio(self) -> float | None:
        """Predicted seconds divided by measured ones; None where one of them is not known."""
        return _ratio(self.answer and self.answer.seconds, self.row.seconds)

    @property
    def nbytes_ratio(self) -> float | None:
        """Predicted bytes divided by measured ones; None where one of them is not known."""
        return _ratio(self.answer and self.answer.nbytes, self.row.nbytes)


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured if predicted is not None and measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A reader of one kind of file, recognised by its `columns`; the `source` of its rows is one of `names`."""

    names: tuple[str, ...]
    columns: frozenset[str]
    read: Callable[[Sequence[Fields]], Iterable[Row]]


def number(fields: Fields, *columns: str) -> float | None:
    """The first of the columns that has a number in it, None where none has. Raises ValueError for other text."""
    text = next((fields[column] for column in columns if fields.get(column)), "")
    return float(text) if text else None


def whole(fields: Fields, column: str, default: int | None = None) -> int:
    """The whole number in a column. Raises ValueError where there is none, and no default either."""
    text = fields.get(column, "")
    if not text and default is not None:
        return default
    if not text or float(text) % 1:
        raise ValueError(f"column {column!r}: {text!r} is no whole number")
    return int(float(text))
