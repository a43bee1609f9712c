"""The results of rows. Equal questions are answered once, those about one model in turn, as they share its trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.published.planned import Configuration
from benchmarks.published.rows import Answer, Question, Result, Row
from benchmarks.published.zero_bubble import TaskTimes
from passes.errors import PlanningError


def predict(rows: Sequence[Row], on_row: Callable[[Row], None] = lambda row: None) -> list[Result]:
    """The predictions for all rows, in their order; `on_row` is called with a row before it is predicted."""
    answers: dict[Question, Answer | str] = {}
    for row in sorted(rows, key=_shared_parts):
        on_row(row)
        if row.question is not None and row.question not in answers:
            answers[row.question] = _answer(row.question)
    results = [_result(row, answers) for row in rows]
    return _relative(results)


def _shared_parts(row: Row) -> tuple[str, ...]:
    """A sorting key that puts rows with the same model, microbatches and stages side by side."""
    config = row.question.configuration if isinstance(row.question, TaskTimes) else row.question
    if not isinstance(config, Configuration):
        return (row.source,)
    stages = config.pipeline * config.interleave
    return ("", str(config.job), f"{config.microbatches:6}", f"{stages:6}", str(replace(config, schedule="")))


def _answer(question: Question) -> Answer | str:
    """The answer, or the reason why there is none."""
    try:
        return question.answer()
    except PlanningError as error:
        return " ".join(str(error).split())


def _result(row: Row, answers: dict[Question, Answer | str]) -> Result:
    if row.question is None:
        return Result(row=row, why=row.why)
    answer = answers[row.question]
    return Result(row=row, why=answer) if isinstance(answer, str) else Result(row=row, answer=answer)


def _relative(results: Sequence[Result]) -> list[Result]:
    """The results, with predicted seconds in steps of the base where a row has one."""
    named = {(r.row.source, r.row.name): r.answer for r in results}
    relative: list[Result] = []
    for result in results:
        row, answer = result.row, result.answer
        if row.base and answer and answer.seconds is not None:
            base = named.get((row.source, row.base))
            if base is None or not base.seconds:
                result = replace(result, answer=None, why=f"its base, {row.base}, was not predicted")
            else:
                result = replace(result, answer=replace(answer, seconds=answer.seconds / base.seconds))
        relative.append(result)
    return relative
