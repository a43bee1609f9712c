"""The interface of planners: from a step, a cluster and options to a plan, and the variant of the step that it plans.

A planner of your own is any value with such a method:

    class HalfTheDevices:
        def plan(self, step, cluster, options):
            (group,) = cluster.groups
            half = replace(group, devices_per_host=group.devices_per_host // 2)
            return Zero(3).plan(step, Cluster(name="half", groups=(half,)), options)

It may plan a variant of its choice, such as `step.variant(Variant(microbatches=4))`, or place every operator by itself;
it returns `Planned.of(plan, step)`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from typing import Any, Protocol, Self, TypeVar

from passes.cluster import Cluster
from passes.errors import PlanningError, explain
from passes.ir import Graph, StatePairs
from passes.plan import AnyPlan
from passes.progress import Report, silent
from passes.step import Step, as_written, seen_by
from passes.text import parse_nbytes, plain_integer

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of a call of any planner: the bytes that a device may need, and the callback for progress.

    `memory_limit` is None if the user gives none. A planner that does not search may ignore it: the caller refuses a
    plan that needs more.
    """

    memory_limit: int | None = None
    report: Report = silent


PLAIN = PlanOptions()
"""The options of a call that sets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and the variant of the step that it plans.

    A plan that was `searched` for may turn out differently for less memory. `memory_limit` is the limit that it was to
    keep, None without one.
    """

    plan: AnyPlan
    step: Step
    searched: bool = False
    memory_limit: int | None = None

    @classmethod
    def of(cls, plan: AnyPlan, step: Step, **search: Any) -> Self:
        """The plan, with the record of the variant of the step that it plans."""
        return cls(plan=plan.of_variant(step.chosen), step=step, **search)


def limit_nbytes(*limits: object) -> int | None:
    """The bytes of the first limit that is not None: a number, or text (`"12 GiB"`). Raises PlanningError."""
    written = next((limit for limit in limits if limit is not None), None)
    if written is None:
        return None
    nbytes = parse_nbytes(written) if isinstance(written, str) else plain_integer(written)
    if isinstance(nbytes, int | float) and not isinstance(nbytes, bool) and 1 <= nbytes < math.inf:
        return int(nbytes)
    rule = "a limit is a number of bytes from 1, or words such as '12 GiB'"
    remedy = "leave it out for the device's own memory"
    raise PlanningError(explain(f"memory_limit={written!r:.60}", rule, "", remedy))


class Planner(Protocol):
    """Anything that plans a step for a cluster."""

    def plan(self, step: Step, cluster: Cluster, options: PlanOptions, /) -> Planned:
        """A plan of a variant of the step. Raises PlanningError where there is none."""
        ...


def named(planner: Planner) -> str:
    """A planner as it would be written, without default values: `Megatron(data=4, tensor=2)`."""
    if not is_dataclass(planner):
        return type(planner).__name__
    usual = {field.name: field.default for field in fields(planner)}
    factories = {field.name: field.default_factory for field in fields(planner)}
    words = [
        f"{name}={value!r}"
        for name, value in ((field.name, getattr(planner, field.name)) for field in fields(planner))
        if value != usual[name] and not (callable(make := factories[name]) and make() == value)
    ]
    return f"{type(planner).__name__}({', '.join(words)})"


def takes_graphs(plan: Method) -> Method:
    """The method `plan(step, cluster, options)` of a planner, which also takes a graph in place of the step.

    In that case it returns the plan alone, and warns: that was the interface before there were steps.
    """

    @wraps(plan)
    def either(
        self: object,
        step: Step | Graph,
        cluster: Cluster,
        options: PlanOptions = PLAIN,
        *,
        tied: StatePairs = (),
        donated: Sequence[bool] = (),
    ) -> Planned | AnyPlan:
        if isinstance(step, Step):
            planned = plan(self, seen_by(step, cluster), cluster, options)
            return replace(planned, step=as_written(planned.step))
        warnings.warn(
            f"{type(self).__name__}.plan(graph, cluster, tied=, donated=) is deprecated: write "
            "plan(Step(graph=graph, state_pairs=tied, donated=donated), cluster).plan",
            DeprecationWarning,
            stacklevel=2,
        )
        return plan(self, Step(graph=step, state_pairs=tied, donated=tuple(donated)), cluster, options).plan

    return either  # pyright: ignore[reportReturnType] # it takes what `plan` does, and graphs
