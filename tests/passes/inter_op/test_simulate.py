"""Timelines take the published time, account for every second and byte, and can be looked at."""

import csv
import itertools
import json
import math
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from passes.errors import InternalError
from passes.inter_op import SCHEDULES, StageCost, Task, Timeline, Transfer, build, simulate
from passes.inter_op.schedule_registry import gpipe, interleaved, one_f_one_b, zero_bubble_h1
from passes.inter_op.schedules import play

PUBLISHED = Path(__file__).resolve().parents[3] / "benchmarks" / "published" / "data" / "zero_bubble.csv"
COLUMNS = ("model", "num_microbatches", "schedule")
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zero-bubble-h1"}
EVEN = StageCost.split(1, 1, 1)


def hop(seconds: float) -> Transfer:
    return Transfer(forward_seconds=seconds, backward_seconds=seconds)


def published() -> list[Any]:
    """(row of Table 5, its times in Table 6) of every schedule that we have."""
    rows = list(csv.DictReader(PUBLISHED.read_text().splitlines()))
    times = {(r["model"], r["num_microbatches"]): r for r in rows if r["table"].startswith("Table 6")}
    rates = [r for r in rows if r["table"].startswith("Table 5") and r["schedule"] in NAMES]
    return [(rate, times[rate["model"], rate["num_microbatches"]]) for rate in rates]


def bubble_rate(row: dict[str, str], times: dict[str, str]) -> float:
    """The paper's (cost - m (F + B + W)) / cost, the cost being the longest time of any stage from start to end.

    The authors give each layer a chunk of its own; the embedding and the head count as a layer each, which is why
    their first and last stages hold one less.
    """
    p, m = int(row["p"]), int(row["num_microbatches"])
    chunks = (int(row["layers"]) + 2) // p if row["schedule"] == "1F1B-I" else 1
    forward, inputs, weights, transfer = (float(times[f"T_{kind}_ms"]) for kind in ("F", "B", "W", "comm"))
    stage = StageCost.split(forward / chunks, inputs / chunks, weights / chunks)
    schedule = build(NAMES[row["schedule"]], p * chunks, m, chunks)
    timeline = simulate(schedule, [stage] * (p * chunks), [hop(transfer)] * (p * chunks - 1))
    cost = max(e - s for s, e in zip(timeline.start_seconds, timeline.end_seconds, strict=True))
    return (cost - m * (forward + inputs + weights)) / cost


def test_there_is_something_to_compare_with() -> None:
    assert len(published()) == 36


@pytest.mark.parametrize(("row", "times"), published(), ids=lambda r: "-".join(r[key] for key in COLUMNS))
def test_published_bubble_rates(row: dict[str, str], times: dict[str, str]) -> None:
    """1F1B and ZB-H1 to the last digit printed; interleaved up to 0.35 points above.

    The authors' interleaved figures let a microbatch go from the last group to the first without waiting for the
    transfer, unless it is the first of its round (`_rk == 0` in their efficiency.py); here all wait. Leaving that
    wait out gives all 12 of their figures to the last digit.
    """
    difference = bubble_rate(row, times) - float(row["bubble_rate"])
    if row["schedule"] == "1F1B-I":
        assert 0 < difference < 0.0036
    else:
        assert abs(difference) < 0.5e-4 + 1e-9


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_second_is_busy_or_idle(name: str) -> None:
    schedule = build(name, 4, 8)
    stages = [
        StageCost(
            forward_seconds=1 + s,
            backward_seconds=2 + s,
            input_gradient_seconds=1,
            weight_gradient_seconds=1 + s,
            finish_seconds=s,
        )
        for s in range(4)
    ]
    timeline = simulate(schedule, stages, [hop(0.25)] * 3)
    assert timeline.busy_seconds == tuple(8 * (3 + 2 * s) + s for s in range(4))
    assert timeline.seconds == max(timeline.end_seconds)
    assert timeline.bubbles == tuple(1 - busy / timeline.seconds for busy in timeline.busy_seconds)
    assert timeline.bubble == pytest.approx(sum(timeline.bubbles) / 4)
    assert timeline.start_seconds == tuple(s + s * (s - 1) / 2 + 0.25 * s for s in range(4))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_task_starts_before_its_data_or_while_its_group_is_busy(name: str) -> None:
    schedule = build(name, 4, 8)
    timeline = simulate(schedule, [EVEN] * 4, [hop(0.25)] * 3)
    ends = {span.task: span.end_seconds for span in timeline.spans}
    gradients = {(t.stage, t.microbatch): end for t, end in ends.items() if t.kind in ("backward", "input_gradient")}
    outputs = {(t.stage, t.microbatch): end for t, end in ends.items() if t.kind == "forward"}
    free = [0.0] * 4
    for span in timeline.spans:
        stage, microbatch = span.task.stage, span.task.microbatch
        assert span.start_seconds >= free[stage]
        free[stage] = span.end_seconds
        match span.task.kind:
            case "forward":
                assert span.start_seconds >= outputs.get((stage - 1, microbatch), -0.25) + 0.25
            case "weight_gradient":
                assert span.start_seconds >= gradients[stage, microbatch]
            case _:
                assert span.start_seconds >= outputs[stage, microbatch]
                assert span.start_seconds >= gradients.get((stage + 1, microbatch), -0.25) + 0.25


def test_first_and_last_wait_for_each_transfer_once() -> None:
    """gpipe: nothing hides the way there and back."""
    assert simulate(gpipe(4, 8), [EVEN] * 4, [hop(0.5)] * 3).seconds == (8 + 3) * 3 + 2 * 3 * 0.5


def test_each_boundary_and_direction_has_its_own_transfer() -> None:
    transfers = [Transfer(forward_seconds=1, backward_seconds=10), Transfer(forward_seconds=100, backward_seconds=1000)]
    assert simulate(gpipe(3, 1), [EVEN] * 3, transfers).seconds == 3 * 3 + 1111


def test_the_slowest_stage_sets_the_pace() -> None:
    """sum of all + (m - 1) times the slowest (Alpa, 2201.12023, equation 2); 1F1B fills a little of the rest."""
    stages = [StageCost(forward_seconds=t, backward_seconds=2 * t) for t in (1, 4, 2)]
    estimate = 3 * (1 + 4 + 2) + 7 * 3 * 4
    assert simulate(gpipe(3, 8), stages).seconds == estimate
    assert 1 + 8 * 3 * 4 + 2 <= simulate(one_f_one_b(3, 8), stages).seconds < estimate


def test_blocking_transfers_hold_the_sender() -> None:
    one = simulate(gpipe(2, 4), [EVEN] * 2, [hop(0.5)], overlap=0.0)
    assert one.seconds == simulate(gpipe(2, 4), [EVEN] * 2, [hop(0.5)]).seconds + 2 * 3 * 0.5
    assert one.busy_seconds == (12, 12)


def test_eager_warm_up_hides_transfers() -> None:
    """What it is for: 1F1B pays for transfers in every round, the eager one once."""
    seconds = {
        name: simulate(build(name, 4, 16), [EVEN] * 4, [hop(0.5)] * 3).seconds for name in ("1f1b", "eager-1f1b")
    }
    assert seconds["eager-1f1b"] == (16 + 3) * 3 + 2 * 3 * 0.5
    assert seconds["1f1b"] > seconds["eager-1f1b"] + 4


def test_stages_of_one_group_need_no_transfer() -> None:
    assert simulate(interleaved(2, 4, chunks=2), [EVEN] * 2, [hop(5)]).seconds == 4 * 2 * 3


def test_every_task_is_dispatched() -> None:
    timeline = simulate(one_f_one_b(4, 8), [EVEN] * 4, dispatch_seconds=0.25)
    assert timeline.seconds == (8 + 3) * (3 + 2 * 0.25)
    assert timeline.busy_seconds == (8 * 3.5,) * 4


def test_steps_end_once_on_every_group() -> None:
    stages = [StageCost(forward_seconds=1, backward_seconds=2, finish_seconds=s + 1) for s in range(4)]
    plain = simulate(interleaved(4, 4, chunks=2), [EVEN] * 4)
    timeline = simulate(interleaved(4, 4, chunks=2), stages)
    assert timeline.finish_seconds == (4, 6)
    assert [end - before for end, before in zip(timeline.end_seconds, plain.end_seconds, strict=True)] == [4, 6]


def test_peak_bytes_are_those_of_all_stages_of_a_group() -> None:
    stages = [
        StageCost(forward_seconds=1, backward_seconds=2, in_flight_nbytes=10 + s, persistent_nbytes=1000 * s)
        for s in range(4)
    ]
    assert simulate(gpipe(4, 8), stages).peak_nbytes == (80, 1088, 2096, 3104)
    assert simulate(one_f_one_b(4, 8), stages).peak_nbytes == (40, 1033, 2024, 3013)
    assert simulate(interleaved(4, 2, chunks=2), stages).peak_nbytes == (2000 + 2 * 10 + 2 * 12, 4000 + 2 * 11 + 13)


def test_wrong_costs_are_refused() -> None:
    with pytest.raises(InternalError, match="3 stage costs and 0 transfers for gpipe of 2 stages"):
        simulate(gpipe(2, 4), [EVEN] * 3)
    with pytest.raises(InternalError, match="2 stage costs and 2 transfers"):
        simulate(gpipe(2, 4), [EVEN] * 2, [hop(1)] * 2)
    with pytest.raises(InternalError, match="without input_gradient_seconds"):
        simulate(zero_bubble_h1(1, 1), [StageCost(forward_seconds=1, backward_seconds=2)])


def example() -> Timeline:
    stage = StageCost(forward_seconds=1e-3, backward_seconds=2e-3, finish_seconds=1e-3, in_flight_nbytes=2**30)
    return simulate(one_f_one_b(2, 4), [stage] * 2)


def test_timeline_is_drawn_to_scale() -> None:
    assert example().format() == (
        "1f1b of 2 stages and 4 microbatches: 16.0 ms, bubble 18.8 %\n"
        "  group  time                                                   bubble      peak\n"
        "      0  F0-F1--......B0-----F2-B1-----F3-B2-----...B3-----===  18.8 %  2.00 GiB\n"
        "      1  ...F0--B0----F1--B1----F2-B2-----F3-B3-----===.......  18.8 %  1.00 GiB\n"
        "  F forward, B backward, F3 or f of microbatch 3, = end of step, . idle"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_line_of_text_for_each_group(name: str, width: int) -> None:
    timeline = simulate(build(name, 8, 32), [EVEN] * 8, [hop(0.1)] * 7)
    lines = timeline.format(width).splitlines()
    assert all(len(line) <= width for line in lines[1:])
    assert [line.split()[0] for line in lines[2:10]] == [str(group) for group in range(8)]
    assert "F forward, B " in lines[10]


def test_a_step_without_time_is_drawn() -> None:
    nothing = StageCost(forward_seconds=0, backward_seconds=0)
    timeline = simulate(gpipe(2, 2), [nothing] * 2)
    assert timeline.bubble == 0
    assert "0 s" in timeline.format()


def test_trace_has_a_track_for_each_group() -> None:
    timeline = example()
    events = json.loads(json.dumps(timeline.to_trace()))
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["device group 0", "device group 1"]
    runs = [e for e in events if e["ph"] == "X"]
    assert len(runs) == 2 * 4 * 2 + 2
    assert runs[0] == {
        "ph": "X",
        "name": "forward of microbatch 0 on stage 0",
        "cat": "forward",
        "pid": 0,
        "tid": 0,
        "ts": 0,
        "dur": 1000,
        "args": {"stage": 0, "microbatch": 0},
    }
    for group in range(2):
        busy = sum(e["dur"] for e in runs if e["tid"] == group)
        assert math.isclose(busy, 1e6 * timeline.busy_seconds[group])


def test_tasks_can_be_issued_in_the_order_of_the_timeline() -> None:
    schedule = zero_bubble_h1(4, 8)
    assert simulate(schedule, [EVEN] * 4).tasks == tuple(span.task for span in play(schedule, lambda task: 1.0))
    starts = [span.start_seconds for span in simulate(schedule, [EVEN] * 4, [hop(0.3)] * 3).spans]
    assert starts == sorted(starts)


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble-h1"])
def test_a_task_of_a_large_schedule_takes_no_longer_to_simulate(name: str) -> None:
    assert lines_of_a_task(name, 16, 64) <= 1.05 * lines_of_a_task(name, 8, 32)


def lines_of_a_task(name: str, stages: int, microbatches: int) -> float:
    """Lines of Python that simulating one task of a schedule takes on average."""
    schedule, lines = build(name, stages, microbatches), itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            next(lines)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        timeline = simulate(schedule, [EVEN] * stages, [hop(0.1)] * (stages - 1))
    finally:
        sys.settrace(before)
    return next(lines) / len(timeline.spans)


@pytest.mark.parametrize("overlap", [1.0, 0.0, 0.25])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(5))
def test_tasks_start_as_soon_as_they_can(seed: int, name: str, overlap: float) -> None:
    """Against times found by going over all tasks until none changes, with costs that are all different."""
    r = random.Random(seed)
    n_stages = 4
    schedule = build(name, n_stages, r.choice((4, 8)))
    stages = [
        StageCost(
            forward_seconds=r.random(),
            backward_seconds=r.random(),
            input_gradient_seconds=r.random(),
            weight_gradient_seconds=r.random(),
            finish_seconds=r.random(),
            in_flight_nbytes=r.randint(1, 99),
            persistent_nbytes=r.randint(1, 999),
        )
        for _ in range(n_stages)
    ]
    hops = [Transfer(forward_seconds=r.random(), backward_seconds=r.random()) for _ in range(n_stages - 1)]
    timeline = simulate(schedule, stages, hops, dispatch_seconds=0.1, overlap=overlap)
    seconds = {task: 0.1 + stages[task.stage].seconds(task.kind) for tasks in schedule.groups for task in tasks}

    def sent(task: Task) -> float:
        """Seconds to the neighbour that waits for a task."""
        if task.kind == "forward":
            return hops[task.stage].forward_seconds if task.stage + 1 < n_stages else 0.0
        return hops[task.stage - 1].backward_seconds if task.kind != "weight_gradient" and task.stage else 0.0

    def waits_for(task: Task, other: Task) -> float | None:
        """When a task may begin after the end of another, None where it need not wait for it."""
        if other.microbatch != task.microbatch:
            return None
        gradient = other.kind in ("backward", "input_gradient")
        if task.kind == "forward":
            return sent(other) if other.kind == "forward" and other.stage == task.stage - 1 else None
        if task.kind == "weight_gradient":
            return 0.0 if gradient and other.stage == task.stage else None
        if other.kind == "forward" and other.stage == task.stage:
            return 0.0
        return sent(other) if gradient and other.stage == task.stage + 1 else None

    before = {task: [(o, w) for o in seconds if (w := waits_for(task, o)) is not None] for task in seconds}
    for tasks in schedule.groups:
        for one, other in itertools.pairwise(tasks):
            before[other].append((one, (1 - overlap) * sent(one)))
    starts = dict.fromkeys(seconds, 0.0)
    changed = True
    while changed:
        after = {t: max((starts[o] + seconds[o] + wait for o, wait in before[t]), default=0.0) for t in seconds}
        changed, starts = after != starts, after
    assert {span.task: span.start_seconds for span in timeline.spans} == pytest.approx(starts)
    for group, tasks in enumerate(schedule.groups):
        own = range(group, n_stages, len(schedule.groups))
        ends = max(starts[t] + seconds[t] for t in tasks)
        assert timeline.end_seconds[group] == pytest.approx(ends + sum(stages[s].finish_seconds for s in own))
        live = peak = sum(stages[s].persistent_nbytes for s in own)
        for task in tasks:
            kept = stages[task.stage].in_flight_nbytes
            live += kept if task.kind == "forward" else 0 if task.kind == "input_gradient" else -kept
            peak = max(peak, live)
        assert timeline.peak_nbytes[group] == peak
