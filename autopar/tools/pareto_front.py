"""Plans of one step on the Pareto front of time and memory: each needs fewer bytes than the one before, and takes
longer.

The first is the plan as the user asked for it. Each next one may need at most the share `LESS` of the bytes of the
last; the search finds the cheapest way: more sharding, more microbatches, recomputation, offloading.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from autopar.api import ParallelFunction
from autopar.tools.plot import blank, save
from passes.errors import OverBudgetError
from passes.plan import AnyPlan
from passes.text import Column, Table, quantities

LESS = 0.85
"""The share of the last plan's peak that the next one may need."""


def front(step: ParallelFunction, args: Sequence[Any], kwargs: dict[str, Any], most: int) -> list[AnyPlan]:
    """At most that many plans, the fastest first; fewer where none needs fewer bytes."""
    plans: list[AnyPlan] = [step.plan(*args, **kwargs)]
    while len(plans) < most and not plans[-1].is_interrupted:
        try:
            plan = step.replan(memory_limit=int(LESS * plans[-1].peak_nbytes)).plan(*args, **kwargs)
        except OverBudgetError:
            break
        while plans and plan.step_seconds < plans[-1].step_seconds:  # a search with a limit may look longer
            plans.pop()
        plans.append(plan)
    return plans


def table(plans: Sequence[AnyPlan]) -> Table:
    """The plans, what each costs against the first, and what was chosen."""
    first = plans[0]
    rows = [
        (
            str(number),
            quantities.seconds(plan.step_seconds),
            quantities.change(first.step_seconds, plan.step_seconds),
            quantities.nbytes(plan.peak_nbytes),
            quantities.change(first.peak_nbytes, plan.peak_nbytes),
            ", ".join(filter(None, (plan.shape, str(plan.variant())))),
        )
        for number, plan in enumerate(plans, 1)
    ]
    headings = ("plan", "step", "", "peak", "", "chosen")
    columns = tuple(Column(heading=h, right=h != "chosen", flexible=h == "chosen") for h in headings)
    note = "" if len(plans) > 1 else "No plan was found that needs 15 % less memory."
    return Table(title="time against memory", columns=columns, rows=tuple(rows), note=note)


def plot(plans: Sequence[AnyPlan], path: str | os.PathLike[str]) -> None:
    """Draws each plan as a point, seconds of a step against bytes of a device. Raises PlanningError."""
    figure = blank(path)
    axes = figure.subplots()
    sizes = [plan.peak_nbytes / 2**30 for plan in plans]
    milliseconds = [1e3 * plan.step_seconds for plan in plans]
    axes.plot(sizes, milliseconds, marker="o", drawstyle="steps-post")
    for number, point in enumerate(zip(sizes, milliseconds, strict=True), 1):
        axes.annotate(str(number), point, xytext=(4, 6), textcoords="offset points")
    axes.set(xlabel="GiB of one device", ylabel="ms of a step, predicted")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
