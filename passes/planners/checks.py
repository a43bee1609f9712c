"""Checks of planners' options: numbers, names of schedules, a solver's options; errors name the option."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

from passes.cluster import Cluster
from passes.errors import PlanningError, close, explain
from passes.inter_op import SCHEDULES, is_chunked
from passes.solver import SolverOptions
from passes.text import count, plain_integer


def check_counts(planner: object, *names: str) -> None:
    """Turns whole-number fields of a planner into Python integers. Raises PlanningError unless all are from 1."""
    set_integers(planner, *names)
    for name in names:
        check_count(type(planner).__name__, name, getattr(planner, name))


def check_optional_counts(planner: object, *names: str) -> None:
    """Checks the fields that are not None as `check_counts` does."""
    check_counts(planner, *(name for name in names if getattr(planner, name) is not None))


def check_count(planner: str, name: str, value: object) -> None:
    """Raises PlanningError unless an option is a whole number from 1."""
    if not _is_count(value):
        rule = "should be a whole number from 1"
        raise PlanningError(explain(f"{planner}({name}={value!r:.40})", rule, "", "write, say, 2"))


def set_integers(planner: object, *names: str) -> None:
    """Turns NumPy integers in fields of a planner into Python's."""
    for name in names:
        object.__setattr__(planner, name, plain_integer(getattr(planner, name)))


def checked_submeshes(planner: str, sizes: Any) -> tuple[int, ...]:
    """The devices of each submesh. Raises PlanningError for anything but a sequence of counts."""
    listed = _listed(sizes)
    counts = None if listed is None else tuple(map(plain_integer, listed))
    if counts is not None and all(map(_is_count, counts)):
        return cast("tuple[int, ...]", counts)
    rule = "these are the devices of each submesh, whole numbers from 1"
    raise PlanningError(explain(f"{planner}(submeshes={sizes!r:.60})", rule, "", "leave it out for equal ones"))


def check_layers(planner: str, pattern: object) -> None:
    """Raises PlanningError for anything but a pattern of module names."""
    if not isinstance(pattern, str):
        rule = "this is a pattern of names of modules"
        raise PlanningError(explain(f"{planner}(layers={pattern!r:.40})", rule, "", 'write, say, layers="Block_*"'))


def check_seconds(seconds: Any) -> None:
    """Raises PlanningError unless a time limit is a number of seconds from 0, or None."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 <= seconds < math.inf):
        rule = "a limit is a number of seconds"
        raise PlanningError(explain(f"Auto(seconds={seconds!r:.40})", rule, "", "leave it out for none"))


def checked_schedules(planner: str, names: Any) -> tuple[str, ...]:
    """The names of these schedules; those of a set in the order of the table, as the first one tried decides ties.

    Raises PlanningError for unknown names, and for a single name in place of several.
    """
    listed = _listed(names)
    unknown = [name for name in ((names,) if listed is None else listed) if not _is_schedule(name)]
    if listed is not None and not unknown:
        return tuple(name for name in SCHEDULES if name in listed) if isinstance(names, Set) else listed
    rule = f"schedules are a tuple of names; known are {', '.join(SCHEDULES)}"
    meant = f"write ({names!r},)" if not unknown else close(str(unknown[0]), SCHEDULES)
    raise PlanningError(explain(f"{planner}(schedules={names!r:.60})", rule, "", meant or "leave it out for all"))


def checked_schedule(planner: str, name: Any, interleave: int) -> str:
    """The name of the schedule, by which each submesh serves `interleave` stages in turn.

    With several of them, the default becomes `interleaved`. Raises PlanningError for an unknown schedule, and for one
    without turns.
    """
    if not _is_schedule(name):
        rule, remedy = f"known are {', '.join(SCHEDULES)}", close(str(name), SCHEDULES) or "leave it out"
        raise PlanningError(explain(f"{planner}(schedule={name!r:.60})", rule, "", remedy))
    schedule = "interleaved" if interleave > 1 and name == "1f1b" else cast("str", name)
    if interleave > 1 and not is_chunked(schedule):
        chunked = ", ".join(repr(each) for each in SCHEDULES if is_chunked(each))
        rule = f"it gives each submesh one stage, not {interleave} that take turns; {chunked} has turns"
        remedy = "leave out interleave=, or schedule="
        raise PlanningError(explain(f"{planner}(schedule={name!r}, interleave={interleave})", rule, "", remedy))
    return schedule


def check_devices(cluster: Cluster, **sizes: int) -> None:
    """Raises PlanningError unless the sizes of a `Megatron` multiply to the cluster's devices."""
    total = math.prod(sizes.values())
    if total != cluster.n_devices:
        call = f"Megatron({', '.join(f'{name}={size!r}' for name, size in sizes.items())})"
        rule = f"this makes {count(total, 'device')}, and cluster {cluster.name!r} has {cluster.n_devices}"
        raise PlanningError(explain(call, rule, "", "choose sizes whose product is the number of devices"))


def check_zero_stage(stage: object) -> None:
    """Raises PlanningError unless it is a stage of ZeRO: 1, 2 or 3."""
    if type(stage) is not int or stage not in (1, 2, 3):
        raise PlanningError(
            f"Zero(stage={stage!r}): ZeRO has stages 1, 2 and 3; use one of them, or DataParallel() for none"
        )


def check_optimizer_stage(stage: object) -> None:
    """Raises PlanningError unless ZeRO's stage is 0 or 1, the ones that go with tensor parallelism and pipelines."""
    if type(stage) is not int or stage not in (0, 1):
        rule = "beside tensors and stages optimizer state alone is cut over the data devices: zero=0 or 1"
        remedy = "use zero=1, or planner=Zero(3) over all devices"
        raise PlanningError(explain(f"Megatron(zero={stage!r})", rule, "", remedy))


def check_solver(planner: str, solver: object) -> None:
    """Raises PlanningError for anything but SolverOptions."""
    if not isinstance(solver, SolverOptions):
        remedy = f"write solver=SolverOptions(solver={solver!r:.40})"
        raise PlanningError(explain(f"{planner}(solver={solver!r:.40})", "these are SolverOptions", "", remedy))


def listed(planner: str, name: str, values: Any) -> tuple[Any, ...]:
    """The values that a user listed, one for each submesh. Raises PlanningError for anything but a list, such as a
    dict.
    """
    each = None if isinstance(values, Mapping) else _listed(values)
    if each is None:
        rule = "these are one for each submesh, None for any"
        raise PlanningError(explain(f"{planner}({name}={values!r:.60})", rule, "", f"write, say, {name}=(None, None)"))
    return each


def _listed(values: Any) -> tuple[Any, ...] | None:
    """The values that a user listed; None for text and for anything that is no list."""
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    return tuple(cast("Iterable[Any]", values)) if is_list else None


def _is_schedule(name: object) -> bool:
    return isinstance(name, str) and name in SCHEDULES


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
