"""Tasks as a profile saw them: made-up events of which it is known when each task ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.profiling import Event, Run, StepReport, Steps, measured_spans
from passes.errors import PlanningError
from passes.inter_op import Task
from passes.page import REST, Measured, MeasuredSpan, page_data
from tests.passes.plan.made_up import make_pipeline, make_plan

STEPS = Steps(seconds=(3.0, 1.0, 2.0), host_seconds=(0.5, 0.25, 0.125))


def run(stage: int, kind: str, microbatch: int, *names: str) -> Run:
    task = None if kind == REST else Task(kind=kind, stage=stage, microbatch=microbatch)  # pyright: ignore
    return Run(group=stage % 2, stage=stage, module=f"jit_{kind}", instructions=frozenset(names), task=task)


RUNS = [
    run(0, "forward", 0, "dot", "tanh"),
    run(2, "forward", 0, "dot", "body"),  # of the same submesh, with an instruction that both have and one of a loop
    run(1, "forward", 0, "dot"),
    run(0, "forward", 1, "dot", "tanh"),
    run(2, "forward", 1, "dot", "body"),
    run(1, "forward", 1, "dot"),
    run(1, REST, -1, "add"),
]
TIMES = {"dot": (0.0, 2.0), "tanh": (2.0, 5.0), "body": (3.0, 4.0), "add": (0.0, 1.0)}
DEVICES = ((4, 5), (7,))


def events(steps: int) -> list[Event]:
    """Events of runs that follow one another, ten microseconds apart; a second device of a submesh is later by one."""
    return [
        Event(name=name, module=each.module, device=device, start=begin + first + turn, end=begin + last + turn)
        for step in range(steps)
        for number, each in enumerate(RUNS)
        for late, device in enumerate(DEVICES[each.group])
        for begin in [1e4 * (10 * step + number + 1) + 1e3 * late]
        for name in sorted(each.instructions)
        for turn in ((0.0, 4.0) if name == "body" else (0.0,))
        for first, last in [TIMES[name]]
    ]


def test_each_task_is_where_its_instructions_ran_on_all_devices_of_its_submesh():
    spans = measured_spans(reversed(events(3)), RUNS, DEVICES, 3, 1)
    assert [(span.stage, span.kind, span.microbatch) for span in spans] == [
        *((stage, "forward", microbatch) for microbatch in (0, 1) for stage in (0, 2, 1)),
        (1, REST, -1),
    ]
    lasts = [5.0, 8.0, 2.0, 5.0, 8.0, 2.0, 1.0]
    for number, (span, last) in enumerate(zip(spans, lasts, strict=True)):
        late = 1e3 * (len(DEVICES[span.group]) - 1)
        assert span.start_seconds == pytest.approx(1e4 * number / 1e9)
        assert span.end_seconds == pytest.approx((1e4 * number + late + last) / 1e9)


def test_an_instruction_that_was_not_always_taken_says_nothing_and_without_any_there_is_no_timeline():
    seen = events(2)
    less = [event for event in seen if event.name != "tanh" or event.start > 5e4]
    spans = measured_spans(less, RUNS, DEVICES, 2, 0)
    assert next(span.end_seconds - span.start_seconds for span in spans) == pytest.approx((1e3 + 2.0) / 1e9)
    assert measured_spans([event for event in seen if event.device != 7], RUNS, DEVICES, 2, 0) == ()


def test_a_typical_step_takes_the_median_or_more():
    assert STEPS.typical == 2
    assert replace(STEPS, seconds=(4.0, 1.0, 2.0, 3.0)).typical == 3


def test_measured_steps_are_written_and_read_and_only_beside_their_plan(tmp_path: Path):
    plan = make_pipeline()
    span = MeasuredSpan(group=1, stage=1, microbatch=0, kind="forward", start_seconds=1.0, end_seconds=2.0)
    report = StepReport(plan=plan, steps=STEPS, spans=(span,))
    report.write(tmp_path / "steps.json")
    measured = Measured.load(tmp_path / "steps.json")
    assert measured == report.on_page
    drawn = page_data(plan, measured)["timeline"]
    kinds = drawn["kinds"]  # pyright: ignore
    assert drawn["measured"] == [[1, 1, 0, kinds.index("forward"), 1.0, 2.0]]  # pyright: ignore
    assert page_data(plan, measured)["measured"] == {"seconds": 2.0, "shares": []}
    make_plan().save(tmp_path / "other.json")
    with pytest.raises(PlanningError, match=r"measured steps: they are of program .* and the plan is of"):
        autopar.Plan.load(tmp_path / "other.json").to_html(measured=tmp_path / "steps.json")
    data = json.loads((tmp_path / "steps.json").read_text())
    (tmp_path / "steps.json").write_text(json.dumps(data | {"spans": [[1, 1, 0, "forward", 1.0]]}))
    with pytest.raises(PlanningError, match=r"spans\[0\] has 5 entries, and a span has 6"):
        Measured.load(tmp_path / "steps.json")
    with pytest.raises(PlanningError, match="it cannot be read as JSON"):
        Measured.load(tmp_path / "none.json")
