"""Schedules are complete, in order, come to an end, keep so much in flight and take so long as is published."""

from dataclasses import replace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from passes.errors import PlanningError
from passes.inter_op import SCHEDULES, Schedule, Task, build, is_chunked, register, schedule_registry
from passes.inter_op.costs import in_flight_counts
from passes.inter_op.schedule_registry import (
    Builder,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
)
from passes.inter_op.schedules import Kind, in_flight, play

GROUPS = range(1, 9)
MICROBATCHES = range(1, 17)
PLAIN = tuple(name for name in SCHEDULES if name != "interleaved")


CASES = [(name, p, 1) for name in PLAIN for p in GROUPS] + [("interleaved", p, v) for p in GROUPS for v in (2, 3)]
"""(name, device groups, chunks) of every schedule; `microbatches` tells which numbers to try with it."""


def microbatches(name: str, groups: int) -> list[int]:
    return [m for m in MICROBATCHES if name != "interleaved" or m % groups == 0]


def made(name: str, groups: int, m: int, chunks: int) -> Schedule:
    return build(name, groups * chunks, m, chunks)


def needs(task: Task, schedule: Schedule) -> list[tuple[str, int, int]]:
    """(what, stage, microbatch) that must be there before a task, restated: what is `output` or `gradient`."""
    stage, microbatch = task.stage, task.microbatch
    before = [("output", stage - 1, microbatch)] if stage else []
    after = [("gradient", stage + 1, microbatch)] if stage + 1 < schedule.n_stages else []
    match task.kind:
        case "forward":
            return before
        case "weight_gradient":
            return [("gradient", stage, microbatch)]
        case _:
            return [("output", stage, microbatch), *after]


def assert_in_order(tasks: tuple[Task, ...], schedule: Schedule) -> None:
    """The tasks are those of the schedule, in an order that keeps each group's and every dependency."""
    there: set[tuple[str, int, int]] = set()
    for task in tasks:
        assert set(needs(task, schedule)) <= there, task
        if task.kind != "weight_gradient":
            there.add(("output" if task.kind == "forward" else "gradient", task.stage, task.microbatch))
    for group, expected in enumerate(schedule.groups):
        assert tuple(task for task in tasks if schedule.group_of(task.stage) == group) == expected


def total_seconds(schedule: Schedule, **seconds: float) -> float:
    return max(span.end_seconds for span in play(schedule, lambda task: seconds[task.kind]))


def refusal(schedule: Schedule) -> str:
    with pytest.raises(PlanningError) as caught:
        schedule.verify()
    return str(caught.value)


def with_group(schedule: Schedule, group: int, *tasks: Task) -> Schedule:
    groups = list(schedule.groups)
    groups[group] = tasks
    return replace(schedule, groups=tuple(groups))


def task(kind: Kind, stage: int, microbatch: int) -> Task:
    return Task(kind=kind, stage=stage, microbatch=microbatch)


@pytest.mark.parametrize(("name", "groups", "chunks"), CASES)
def test_every_schedule_verifies_and_has_an_order(name: str, groups: int, chunks: int) -> None:
    for m in microbatches(name, groups):
        schedule = made(name, groups, m, chunks)
        schedule.verify()
        assert (schedule.n_stages, schedule.microbatches) == (groups * chunks, m)
        assert (len(schedule.groups), schedule.chunks) == (groups, chunks)
        assert_in_order(tuple(span.task for span in play(schedule)), schedule)


@pytest.mark.parametrize(("name", "p", "v"), CASES)
def test_microbatches_in_flight_are_as_many_as_published(name: str, p: int, v: int) -> None:
    for m in microbatches(name, p):
        bounds = {
            "gpipe": [m] * p,
            "1f1b": [min(m, p - i) for i in range(p)],
            "eager-1f1b": [min(m, 2 * (p - i) - 1) for i in range(p)],
            "zero-bubble-h1": [min(m, p)] * p,
            "interleaved": [min(m * v, p * (v - 1) + 2 * (p - i) - 1) for i in range(p)],
        }
        assert in_flight(made(name, p, m, v)) == tuple(bounds[name])


@pytest.mark.parametrize("groups", GROUPS)
def test_zero_bubble_keeps_no_more_in_flight_than_1f1b(groups: int) -> None:
    assert max(in_flight(zero_bubble_h1(groups, 16))) == max(in_flight(one_f_one_b(groups, 16)))


def test_interleaved_keeps_the_published_amount_in_flight() -> None:
    """p (1 + (p - 1) / (p v)) microbatches of the whole group on the first one (2205.05198)."""
    p, v = 8, 3
    assert in_flight(interleaved(p * v, 64, v))[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_in_flight_counts_bytes_of_each_stage() -> None:
    assert in_flight(one_f_one_b(3, 8), [5, 7, 11]) == (15, 14, 11)
    assert in_flight(gpipe(2, 4), [0, 10]) == (0, 40)
    assert in_flight(interleaved(2, 2, chunks=2), [3, 4]) == (7,)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 5)])
@pytest.mark.parametrize(("name", "p", "v"), [case for case in CASES if case[0] != "zero-bubble-h1"])
def test_bubble_of_whole_backwards(name: str, p: int, v: int, forward: int, backward: int) -> None:
    """(p - 1) / (m v) of the ideal time."""
    for m in microbatches(name, p):
        ideal = m * v * (forward + backward)
        seconds = total_seconds(made(name, p, m, v), forward=forward, backward=backward)
        assert (seconds - ideal) * m * v == (p - 1) * ideal


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_bubble_does_not_depend_on_the_share_of_forwards(name: str, v: int) -> None:
    assert total_seconds(made(name, 4, 8, v), forward=7, backward=2) == (8 * v + 3) * 9


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 2, 1), (3, 3, 2)])
@pytest.mark.parametrize("p", GROUPS)
def test_bubble_of_zero_bubble(p: int, f: int, b: int, w: int) -> None:
    """With fewer microbatches than groups there is no steady state (2401.10241, appendix H)."""
    for m in MICROBATCHES:
        seconds = total_seconds(zero_bubble_h1(p, m), forward=f, input_gradient=b, weight_gradient=w)
        assert seconds == (m * (f + b + w) + (p - 1) * (f + b - w) if m >= p else (m + p - 1) * (f + b) + w)


@pytest.mark.parametrize("groups", range(2, 9))
def test_zero_bubble_has_a_third_of_the_bubble(groups: int) -> None:
    ideal = 16 * 3
    ours = total_seconds(zero_bubble_h1(groups, 16), forward=1, input_gradient=1, weight_gradient=1) - ideal
    theirs = total_seconds(one_f_one_b(groups, 16), forward=1, backward=2) - ideal
    assert ours * 3 == theirs == 3 * (groups - 1)


def test_warm_ups_as_drawn_in_the_papers() -> None:
    assert one_f_one_b(3, 4).format() == (
        "1f1b of 3 stages and 4 microbatches\n"
        "  group 0  F0 F1 F2 B0 F3 B1 B2 B3\n"
        "  group 1  F0 F1 B0 F2 B1 F3 B2 B3\n"
        "  group 2  F0 B0 F1 B1 F2 B2 F3 B3"
    )
    assert eager_one_f_one_b(3, 6).format().splitlines()[1:] == [
        "  group 0  F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "  group 1  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "  group 2  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]
    assert zero_bubble_h1(3, 4).format().splitlines()[1:] == [
        "  group 0  F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "  group 1  F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "  group 2  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert interleaved(4, 4, 2).format().splitlines()[1:] == [
        "  group 0  F0/0 F1/0 F0/2 F1/2 F2/0 B0/2 F3/0 B1/2 F2/2 B0/0 F3/2 B1/0 B2/2 B3/2",
        "           B2/0 B3/0",
        "  group 1  F0/1 F1/1 F0/3 B0/3 F1/3 B1/3 F2/1 B0/1 F3/1 B1/1 F2/3 B2/3 F3/3 B3/3",
        "           B2/1 B3/1",
    ]


def test_tasks_are_played_by_start_and_then_by_stage() -> None:
    assert [str(span.task) for span in play(gpipe(2, 2))] == [
        "forward of microbatch 0 on stage 0",
        "forward of microbatch 1 on stage 0",
        "forward of microbatch 0 on stage 1",
        "forward of microbatch 1 on stage 1",
        "backward of microbatch 0 on stage 1",
        "backward of microbatch 0 on stage 0",
        "backward of microbatch 1 on stage 1",
        "backward of microbatch 1 on stage 0",
    ]


@given(data=st.data())
def test_order_holds_for_any_seconds(data: st.DataObject) -> None:
    """Also for tasks that take no time, where consumer and producer start at once."""
    name, groups, chunks = data.draw(st.sampled_from(CASES))
    schedule = made(name, groups, data.draw(st.sampled_from(microbatches(name, groups))), chunks)
    seconds = data.draw(st.lists(st.sampled_from((0.0, 0.5, 1.0, 7.0)), min_size=24, max_size=24))
    spans = play(schedule, lambda task: seconds[task.stage] * (task.kind != "forward"), lambda task: seconds[-1])
    assert_in_order(tuple(span.task for span in spans), schedule)
    assert [span.start_seconds for span in spans] == sorted(span.start_seconds for span in spans)


def test_hops_delay_who_receives_and_block_who_sends() -> None:
    schedule = gpipe(2, 2)
    overlapped = play(schedule, hop=lambda task: 0.5)
    assert max(span.end_seconds for span in overlapped) == 6 + 2 * 0.5
    blocked = {span.task: span.start_seconds for span in play(schedule, hop=lambda task: 0.5, overlap=0.0)}
    assert blocked[task("forward", 0, 1)] == 1.5


def test_missing_task_is_found() -> None:
    schedule = one_f_one_b(3, 4)
    text = refusal(with_group(schedule, 1, *schedule.groups[1][:-1]))
    assert "1f1b of 3 stages and 4 microbatches: stage 1 has 1 forward for microbatch 3" in text
    assert "on group 1" in text
    assert "schedule 1 forward, and 1 backward or" in text


def test_doubled_task_is_found() -> None:
    schedule = one_f_one_b(3, 4)
    text = refusal(with_group(schedule, 1, *schedule.groups[1], task("forward", 1, 2)))
    assert "stage 1 has 2 forward and 1 backward for microbatch 2" in text


def test_half_a_backward_is_found() -> None:
    schedule = zero_bubble_h1(2, 2)
    assert "has 1 forward and 1 input gradient" in refusal(with_group(schedule, 0, *schedule.groups[0][:-1]))
    whole = with_group(schedule, 0, *schedule.groups[0], task("backward", 0, 1))
    assert "1 forward and 1 backward and 1 input gradient and 1 weight gradient" in refusal(whole)


def test_wrong_group_is_found() -> None:
    schedule = one_f_one_b(2, 2)
    text = refusal(replace(schedule, groups=schedule.groups[::-1]))
    assert "group 0 has the forward of microbatch 0 on stage 1" in text
    assert "stage 1 lives on group 1" in text
    assert "move it to group 1" in text


@pytest.mark.parametrize("stranger", [task("forward", 2, 0), task("forward", 0, 2), task("backward", -1, 0)])
def test_unknown_task_is_found(stranger: Task) -> None:
    schedule = one_f_one_b(2, 2)
    assert f"group 0 has the {stranger}" in refusal(with_group(schedule, 0, *schedule.groups[0], stranger))


def test_uneven_groups_are_found() -> None:
    assert "as many stages on each of its 2 device groups" in refusal(replace(gpipe(2, 2), n_stages=3))
    assert "0 device groups" in refusal(replace(gpipe(2, 2), groups=()))


def test_backward_before_its_forward_is_found() -> None:
    schedule = gpipe(1, 1)
    text = refusal(with_group(schedule, 0, *schedule.groups[0][::-1]))
    assert "tasks wait for each other" in text
    assert "group 0 is at the backward of microbatch 0 on stage 0, which waits for its forward on stage 0" in text


def test_weight_gradient_before_its_input_gradient_is_found() -> None:
    tasks = (task("forward", 0, 0), task("weight_gradient", 0, 0), task("input_gradient", 0, 0))
    text = refusal(with_group(zero_bubble_h1(1, 1), 0, *tasks))
    assert "the weight gradient of microbatch 0 on stage 0, which waits for its backward on stage 0" in text


def test_groups_that_wait_for_each_other_are_named() -> None:
    """Group 0 wants its first gradient before it starts a second forward; group 1 wants two forwards first."""
    groups = (
        (task("forward", 0, 0), task("backward", 0, 0), task("forward", 0, 1), task("backward", 0, 1)),
        (task("forward", 1, 0), task("forward", 1, 1), task("backward", 1, 0), task("backward", 1, 1)),
    )
    text = refusal(Schedule(name="mine", n_stages=2, microbatches=2, groups=groups))
    assert "group 0 is at the backward of microbatch 0 on stage 0, which waits for its backward on stage 1" in text
    assert "group 1 is at the forward of microbatch 1 on stage 1, which waits for its forward on stage 0" in text


def test_only_the_groups_of_the_circle_are_named() -> None:
    crossed = with_group(gpipe(3, 1), 2, task("backward", 2, 0), task("forward", 2, 0))
    text = refusal(crossed)
    assert "group 2 is at the backward of microbatch 0 on stage 2" in text
    assert "group 0 is at" not in text


def test_microbatches_that_are_no_rounds_are_refused() -> None:
    with pytest.raises(PlanningError) as caught:
        interleaved(8, 6, chunks=2)
    assert "interleaved with microbatches=6: its 4 device groups take microbatches in rounds of 4" in str(caught.value)
    assert "take 4 or 8 microbatches, or the schedule '1f1b'" in str(caught.value)
    with pytest.raises(PlanningError, match="take 4 microbatches"):
        interleaved(8, 3, chunks=2)


@pytest.mark.parametrize(("stages", "chunks", "remedy"), [(9, 2, 1), (6, 4, 3), (2, 4, 2), (4, 0, 1), (4, -1, 1)])
def test_chunks_that_do_not_divide_the_stages_are_refused(stages: int, chunks: int, remedy: int) -> None:
    with pytest.raises(PlanningError, match=f"try chunks={remedy}"):
        interleaved(stages, 8, chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_to_schedule_is_refused(name: str) -> None:
    with pytest.raises(PlanningError, match="stages=0"):
        build(name, 0, 4)
    with pytest.raises(PlanningError, match="microbatches=0"):
        build(name, 4, 0)


def test_one_chunk_is_plain_1f1b() -> None:
    assert build("interleaved", 4, 6) == one_f_one_b(4, 6)


def test_build_knows_names_and_who_has_chunks() -> None:
    with pytest.raises(PlanningError, match="did you mean 'interleaved'"):
        build("interleave", 4, 4)
    with pytest.raises(PlanningError, match="puts 1 stage on each device group, not 2"):
        build("1f1b", 4, 4, 2)


def test_users_add_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_registry, "SCHEDULES", dict(SCHEDULES))

    @register("mine")
    def mine(stages: int, microbatches: int) -> Schedule:
        return replace(gpipe(stages, microbatches), name="mine")

    assert register("mine")(mine) is mine
    assert build("mine", 2, 3).name == "mine"
    with pytest.raises(PlanningError, match="'mine': is in the table"):
        register("mine")(gpipe)


def test_a_schedule_defined_again_replaces_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cell that is run twice was refused the second time."""
    monkeypatch.setattr(schedule_registry, "SCHEDULES", dict(SCHEDULES))

    def define() -> Builder:
        def mine(stages: int, microbatches: int) -> Schedule:
            return gpipe(stages, microbatches)

        return mine

    register("mine")(define())
    again = register("mine")(define())
    assert schedule_registry.SCHEDULES["mine"] is again


def test_a_schedule_defined_again_has_its_own_in_flight_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search weighed the new one by what the old one kept in flight."""
    monkeypatch.setitem(SCHEDULES, "mine", gpipe)
    assert in_flight_counts("mine", 2, 8) == (8, 8)
    monkeypatch.setitem(SCHEDULES, "mine", one_f_one_b)
    assert in_flight_counts("mine", 2, 8) == (2, 1)


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (lambda stages, microbatches: [], r"called for 2 stages on 2 groups and 3 microbatches.*\n.*it returned \[\]"),
        (lambda stages, microbatches: gpipe(stages, 2 * microbatches), "2 stages on 2 groups and 6 microbatches"),
        (lambda stages, microbatches: gpipe(2 * stages, microbatches), "4 stages on 4 groups and 3 microbatches"),
        (lambda stages, microbatches: build("interleaved", stages, 1, 2), "2 stages on 1 group and 1 microbatch"),
    ],
)
def test_a_schedule_of_other_sizes_is_refused(monkeypatch: pytest.MonkeyPatch, builder: Builder, message: str) -> None:
    """One of more microbatches was planned, and priced, as it was; one of more stages ended in an IndexError."""
    monkeypatch.setitem(SCHEDULES, "mine", builder)
    with pytest.raises(PlanningError, match=message):
        build("mine", 2, 3)


@pytest.mark.parametrize("name", [5, "", gpipe])
def test_a_schedule_has_a_name(name: Any) -> None:
    with pytest.raises(PlanningError, match="it is added under a name"):
        register(name)


def test_a_schedule_is_a_function() -> None:
    with pytest.raises(PlanningError, match="'mine', None: a schedule is a function"):
        register("mine")(cast("Any", None))


def test_a_schedule_has_several_stages_on_a_group_if_it_takes_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(stages: int, microbatches: int) -> Schedule:
        return build("1f1b", stages, microbatches)

    def chunked(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
        return replace(build("interleaved", stages, microbatches, chunks), name="chunked")

    monkeypatch.setitem(SCHEDULES, "plain", plain)
    monkeypatch.setitem(SCHEDULES, "chunked", chunked)
    assert [is_chunked(name) for name in ("plain", "chunked", "1f1b", "interleaved")] == [False, True, False, True]
