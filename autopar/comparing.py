"""Several plans of one function, each compiled and stepped here, where predictions are too close to choose by.

Plans that are predicted within a few percent of each other may take times that are further apart. `python -m
benchmarks.zoo --compare` shows what is gained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from autopar.api import ParallelFunction
from autopar.compilation import Compilation
from autopar.distributed import among
from autopar.errors import ArgumentError, explain
from autopar.options import check_arguments
from autopar.profiling import Stepper, Steps, timed, warm_up
from autopar.reporting import stepper_of
from passes.errors import PlanningError
from passes.plan import AnyPlan
from passes.planners import DataParallel, Manual, Megatron, Planner, Zero, named
from passes.text import Column, Table, quantities

ROUNDS, STEPS = 3, 5
"""The number of rounds, and of steps of every plan in each; every other round goes backwards, so that a drift of the
machine's speed affects all alike.
"""

FAR = 3.0
"""The multiple of the fastest prediction from which a textbook plan is not run. Chosen: DLRM's ZeRO-3, predicted to
take 2.5 times as long as the best plan, is about as fast (`python -m benchmarks.zoo --compare`).
"""

OWN = "its own"
"""The name of the plan that the function has without a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of the plans that were compared: its measured steps, or the reason `why` there are none; no plan where none
    was possible.
    """

    name: str
    plan: AnyPlan | None = None
    steps: Steps | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Plans of one function, predicted and measured: `rows`, the fastest first, and those that were not run last.

    `fastest` is the function by the first of them, and `plan` its plan.
    """

    fastest: ParallelFunction[..., Any]
    plan: AnyPlan
    rows: tuple[Compared, ...]

    def tables(self) -> tuple[Table, ...]:
        """The tables of plans that were run, with their median steps, and of those that were not, with the reason."""
        run = [(row, row.steps) for row in self.rows if row.steps]
        timed_rows = tuple(_timed_row(row, steps, run[0][1]) for row, steps in run)
        others = tuple((row.name, _predicted(row), row.why) for row in self.rows if not row.steps)
        numbers = (Column(heading=h, right=True) for h in ("predicted", "measured", "quartiles", "by fastest"))
        columns = Column(heading="plan"), Column(heading="on", flexible=True), *numbers
        timed_table = Table(title="plans, each stepped here", columns=columns, rows=timed_rows)
        reasons = Column(heading="plan"), Column(heading="predicted", right=True), Column(heading="why", flexible=True)
        return (timed_table, *([Table(title="not run", columns=reasons, rows=others)] if others else []))

    def __str__(self) -> str:
        return "\n\n".join(table.format() for table in self.tables())


def compare(
    function: ParallelFunction[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    planners: Mapping[str, Planner] | None = None,
) -> Comparison:
    """The measured steps of `function(*args, **kwargs)` by its own plan and by those of `planners`, one plan after
    another.

    By default `planners` are the textbook ones: data parallel, ZeRO, and Megatron with every number of devices that cut
    the weights; those predicted to take three times as long are left out. `.fastest` is the function by the plan with
    the shortest median step, `.plan` that plan. Steps are taken on copies of donated arguments, so the caller's stay
    valid; a device holds the copies of one plan at a time. Prints and callbacks of a step happen in each of them. Of
    several processes the first one's clock decides.

    Raises PlanningError where the function itself has no plan, ArgumentError for arguments that cannot be compared on.
    """
    _check(function, args, kwargs, planners)
    as_it_is, refused = _planned(function, args, kwargs), list[Compared]()
    as_it_is.check_usable()
    candidates = {OWN: as_it_is}
    for name, planner in (hand_made(as_it_is.plan) if planners is None else planners).items():
        try:
            candidates[name] = _planned(function.replan(planner=planner, cache=False), args, kwargs)
        except ArgumentError:
            raise  # no planner, or one that contradicts the function's options
        except PlanningError as error:
            refused.append(Compared(name=name, why=_first_line(error)))
    least = min(other.plan.step_seconds for other in candidates.values())
    steppers: dict[str, Callable[[], Stepper]] = {}
    for name, other in candidates.items():
        if planners is None and other is not as_it_is and other.plan.step_seconds > FAR * least:
            refused.append(Compared(name=name, plan=other.plan, why="predicted to take far longer"))
            continue
        try:
            other.compilation.ready(other.leaves)
        except PlanningError as error:
            if other is as_it_is:
                raise
            refused.append(Compared(name=name, plan=other.plan, why=_first_line(error)))
        else:
            steppers[name] = partial(stepper_of, other.compilation, other.leaves)
    with as_it_is.compilation.phase("compare plans of"):
        steps = _in_turn(steppers)
    medians = {name: each.median for name, each in steps.items()}
    if processes := among(as_it_is.compilation.present()):
        medians = json.loads(processes.broadcast("comparing plans", lambda: json.dumps(medians)))
    run = sorted(steps, key=lambda name: medians[name])
    plan = candidates[run[0]].plan
    return Comparison(
        fastest=function if run[0] == OWN else function.replan(planner=Manual(plan)),
        plan=plan,
        rows=(*(Compared(name=name, plan=candidates[name].plan, steps=steps[name]) for name in run), *refused),
    )


def _check(function: object, args: object, kwargs: object, planners: object) -> None:
    """Raises ArgumentError for what cannot be compared."""
    if not isinstance(function, ParallelFunction):
        rule, remedy = "its plans are compared, and it has none", "pass autopar.parallelize(function)"
        raise ArgumentError(explain(f"compare({function!r:.60})", rule, "", remedy))
    check_arguments("compare", args)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        remedy = "write compare(step, (state,), {'batch': batch})"
        raise ArgumentError(explain(f"kwargs={kwargs!r:.60}", "these are all arguments by name", "", remedy))
    if planners is not None and not isinstance(planners, Mapping):
        remedy = "write planners={'mine': autopar.Manual('plan.json')}"
        raise ArgumentError(explain(f"planners={planners!r:.60}", "each has the name of its row", "", remedy))
    if planners is not None and OWN in planners:
        rule, remedy = f"{OWN!r} is the function's own plan, which is always compared", "give it another name"
        raise ArgumentError(explain(f"planners={{{OWN!r}: ...}}", rule, "", remedy))


class _Candidate(NamedTuple):
    """A function by one planner, with the flat arguments that it is called on."""

    compilation: Compilation
    leaves: list[Any]

    @property
    def plan(self) -> AnyPlan:
        return self.compilation.plan()

    def check_usable(self) -> None:
        """Raises ArgumentError for arguments on which no step can be taken."""
        compilation = self.compilation
        compilation.signature.check_usable(compilation.traced.graph.input_names, self.leaves, "compare()")


def _planned(function: ParallelFunction[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> _Candidate:
    """The function by its planner, planned. Raises PlanningError where it has no plan."""
    candidate = _Candidate(*function.compilations.given(tuple(args), dict(kwargs or {})))
    candidate.compilation.plan()
    return candidate


def hand_made(plan: AnyPlan) -> dict[str, Planner]:
    """The textbook planners for as many devices as a plan has, by the code that makes them."""
    n = plan.cluster.n_devices
    sizes = (parts for parts in range(2, n + 1) if n % parts == 0)
    megatron = (Megatron(data=n // tensor, tensor=tensor) for tensor in sizes)
    return {named(planner): planner for planner in (DataParallel(), Zero(1), Zero(3), *megatron)}


def _in_turn(steppers: Mapping[str, Callable[[], Stepper]]) -> dict[str, Steps]:
    """The steps of each candidate, over all rounds."""
    steps_of: dict[str, list[Steps]] = {name: [] for name in steppers}
    for number in range(ROUNDS):
        for name in steppers if number % 2 == 0 else reversed(list(steppers)):
            stepper = steppers[name]()
            warm_up(stepper)
            steps_of[name].append(timed(stepper, most=STEPS))
    return {
        name: Steps(
            seconds=tuple(spent for steps in each for spent in steps.seconds),
            host_seconds=tuple(spent for steps in each for spent in steps.host_seconds),
        )
        for name, each in steps_of.items()
    }


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _timed_row(row: Compared, steps: Steps, fastest: Steps) -> tuple[str, ...]:
    """The cells of a plan that was run: what it is, on what, and its steps, predicted, measured, by the fastest's."""
    low, high = steps.spread
    quartiles = f"{quantities.seconds(low)} to {quantities.seconds(high)}"
    ratio = f"{steps.median / fastest.median:.2f}"
    mesh = row.plan.shape if row.plan else "-"
    return row.name, mesh, _predicted(row), quantities.seconds(steps.median), quartiles, ratio


def _predicted(row: Compared) -> str:
    return quantities.seconds(row.plan.step_seconds) if row.plan else "-"
