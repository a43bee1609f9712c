"""The table of schedules, each a function of (stages, microbatches[, chunks]); users may add their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from passes.errors import PlanningError, close, explain
from passes.inter_op.schedules import Kind, Schedule, Task
from passes.text import count

Builder = Callable[..., Schedule]
"""A function of (stages, microbatches), and of `chunks` if it puts several stages on a group."""


SomeBuilder = TypeVar("SomeBuilder", bound=Builder)


SCHEDULES: dict[str, Builder] = {}
"""The schedules by name; `register` adds to it."""


def register(name: str) -> Callable[[SomeBuilder], SomeBuilder]:
    """The decorator that adds a schedule to the table under a name.

    Raises PlanningError for a name of another function's. The same one, defined again as in a notebook, replaces it.
    """
    if not isinstance(cast("object", name), str) or not name:
        remedy = 'write @autopar.register_schedule("mine") above its function'
        raise PlanningError(explain(f"schedule {name!r:.60}", "it is added under a name", "", remedy))

    def add(builder: SomeBuilder) -> SomeBuilder:
        if not callable(builder):
            rule, remedy = "a schedule is a function", "write one of (stages, microbatches) that returns a Schedule"
            raise PlanningError(explain(f"schedule {name!r}, {builder!r:.40}", rule, "", remedy))
        if _source(SCHEDULES.get(name, builder)) != _source(builder):
            raise PlanningError(explain(f"schedule {name!r}", "is in the table", "", "choose another name"))
        SCHEDULES[name] = builder
        return builder

    return add


def _source(builder: Builder) -> tuple[object, object]:
    """The module and the name that a builder was defined under; itself where it has none."""
    return getattr(builder, "__module__", None), getattr(builder, "__qualname__", builder)


def is_chunked(name: str) -> bool:
    """Whether a schedule puts several stages on each device group. Raises PlanningError for an unknown name."""
    return "chunks" in inspect.signature(_builder(name)).parameters


def splits_backward(name: str) -> bool:
    """Whether a schedule runs a backward in two halves, so that the weights' can wait. Raises as `is_chunked` does."""
    return any(task.kind == "weight_gradient" for task in build(name, 1, 1).groups[0])


def build(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name. Raises PlanningError for an unknown name, chunks where it has no use for them, and a
    user's function that returns another schedule than it is called for.
    """
    builder = _builder(name)
    if is_chunked(name):
        return _checked(name, builder(stages, microbatches, chunks=chunks), stages, microbatches, chunks)
    if chunks != 1:
        rule = f"puts 1 stage on each device group, not {chunks}"
        raise PlanningError(explain(f"schedule {name!r}", rule, "", "leave out the chunks, or use 'interleaved'"))
    return _checked(name, builder(stages, microbatches), stages, microbatches, chunks)


def _checked(name: str, built: object, stages: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule that a builder returned. Raises PlanningError for anything else, or one of other sizes."""
    groups = stages // chunks
    rule = f"its function is called for {_sizes(stages, groups, microbatches)}"
    if not isinstance(built, Schedule):
        raise PlanningError(explain(f"schedule {name!r}", rule, f"it returned {built!r:.60}", "return a Schedule"))
    sizes = built.n_stages, len(built.groups), built.microbatches
    if sizes != (stages, groups, microbatches):
        remedy = "return as many as it is called for"
        raise PlanningError(explain(f"schedule {name!r}", rule, f"it returned {_sizes(*sizes)}", remedy))
    return built


def _sizes(stages: int, groups: int, microbatches: int) -> str:
    """`4 stages on 2 groups and 8 microbatches`."""
    rows = count(microbatches, "microbatch", "microbatches")
    return f"{count(stages, 'stage')} on {count(groups, 'group')} and {rows}"


def _builder(name: str) -> Builder:
    """The function that makes the schedule of that name. Raises PlanningError for an unknown name."""
    if name not in SCHEDULES:
        choices = f"known are {', '.join(SCHEDULES)}"
        raise PlanningError(
            explain(f"schedule {name!r}", "is not known", choices, close(name, SCHEDULES) or "pick one")
        )
    return SCHEDULES[name]


@register("gpipe")
def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the microbatches.

    Reference: Huang et al., GPipe (1811.06965), section 2.
    """
    return _warmed_up("gpipe", stages, microbatches, [microbatches] * stages)


@register("1f1b")
def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward, after as many forwards as there are stages to come.

    Reference: Narayanan et al., PipeDream-Flush (2006.09503); Megatron-LM (2104.04473), section 2.2.1.
    """
    return _warmed_up("1f1b", stages, microbatches, [stages - 1 - stage for stage in range(stages)])


@register("eager-1f1b")
def eager_one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B that starts twice as many forwards, so that transfers overlap with compute; more are in flight for it.

    Reference: Zhuang et al., On Optimizing the Communication of Model Parallelism (2211.05322): eager-1F1B.
    """
    return _warmed_up("eager-1f1b", stages, microbatches, [2 * (stages - 1 - stage) for stage in range(stages)])


@register("interleaved")
def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over stages / chunks groups, each with `chunks` stages, which it serves in turn.

    Raises PlanningError unless chunks divide the stages, and the groups the microbatches. One chunk is plain 1F1B.

    Reference: Narayanan et al., Megatron-LM (2104.04473), section 2.2.2.
    """
    _check(stages, microbatches)
    if chunks < 1 or stages % chunks:
        rule = f"each device group should get as many of {count(stages, 'stage')}"
        possible = max(d for d in range(1, max(1, min(chunks, stages)) + 1) if stages % d == 0)
        raise PlanningError(explain(f"interleaved with chunks={chunks}", rule, "", f"try chunks={possible}"))
    if chunks == 1:
        return one_f_one_b(stages, microbatches)
    groups = stages // chunks
    if microbatches % groups:
        below, above = microbatches // groups * groups, -(-microbatches // groups) * groups
        raise PlanningError(
            explain(
                f"interleaved with microbatches={microbatches}",
                f"its {count(groups, 'device group')} take microbatches in rounds of {groups}",
                f"{microbatches} leave {microbatches - below} over",
                f"take {f'{below} or ' if below else ''}{above} microbatches, or the schedule '1f1b'",
            )
        )
    rounds = [range(first, first + groups) for first in range(0, microbatches, groups)]
    turns = [(chunk, microbatch) for some in rounds for chunk in range(chunks) for microbatch in some]
    lists: list[tuple[Task, ...]] = []
    for group in range(groups):
        forwards = [_task("forward", chunk * groups + group, microbatch) for chunk, microbatch in turns]
        backwards = [_task("backward", (chunks - 1 - chunk) * groups + group, mb) for chunk, mb in turns]
        lists.append(_woven(forwards, backwards, (chunks - 1) * groups + 2 * (groups - 1 - group)))
    return Schedule(name="interleaved", n_stages=stages, microbatches=microbatches, groups=tuple(lists))


@register("zero-bubble-h1")
def zero_bubble_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with split backwards: weight gradients wait for idle time, stage s holding back s of them.

    As much is in flight as on the first stage of 1F1B, on every stage.

    Reference: Qi et al., Zero Bubble Pipeline Parallelism (2401.10241), section 2.
    """
    _check(stages, microbatches)
    lists: list[tuple[Task, ...]] = []
    for stage in range(stages):
        forwards, inputs, weights = (
            [_task(kind, stage, microbatch) for microbatch in range(microbatches)]
            for kind in ("forward", "input_gradient", "weight_gradient")
        )
        deferred: list[Task] = []
        tasks: list[Task] = []
        for task in _woven(forwards, inputs, stages - 1 - stage):
            tasks.append(task)
            if task.kind == "input_gradient":
                deferred.append(weights[task.microbatch])
                if len(deferred) > stage:
                    tasks.append(deferred.pop(0))
        lists.append((*tasks, *deferred))
    return Schedule(name="zero-bubble-h1", n_stages=stages, microbatches=microbatches, groups=tuple(lists))


def _warmed_up(name: str, stages: int, microbatches: int, warm_up: Sequence[int]) -> Schedule:
    """The schedule that runs `warm_up` [stages] forwards, then forwards and backwards by turns."""
    _check(stages, microbatches)
    groups = tuple(
        _woven(
            [_task("forward", stage, microbatch) for microbatch in range(microbatches)],
            [_task("backward", stage, microbatch) for microbatch in range(microbatches)],
            warm_up[stage],
        )
        for stage in range(stages)
    )
    return Schedule(name=name, n_stages=stages, microbatches=microbatches, groups=groups)


def _woven(forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int) -> tuple[Task, ...]:
    """The tasks of a group: `warm_up` forwards, then a forward and a backward by turns, then all other backwards."""
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    rest = backwards[max(0, len(forwards) - warm_up) :]
    return (*forwards[:warm_up], *(task for pair in pairs for task in pair), *rest)


def _task(kind: Kind, stage: int, microbatch: int) -> Task:
    return Task(kind=kind, stage=stage, microbatch=microbatch)


def _check(stages: int, microbatches: int) -> None:
    """Raises PlanningError unless there is a stage and a microbatch."""
    for name, number in (("stages", stages), ("microbatches", microbatches)):
        if number < 1:
            raise PlanningError(explain(f"{name}={number}", f"a schedule needs {name}", "", "give a number from 1"))
