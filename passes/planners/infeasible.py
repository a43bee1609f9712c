"""The errors where no plan fits in memory, with the smallest changes by which one does, each of them planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from passes.cluster import CPU, Cluster
from passes.errors import OverBudgetError, PlanningError, explain
from passes.memory import margin_of
from passes.plan import AnyPlan, PipelinePlan, Plan
from passes.text import count, nbytes

_TIMES = (2, 4, 8)
"""The multiples of the devices that are tried: each takes a search of its own."""


def infeasible_error(
    error: OverBudgetError,
    least: Plan | None,
    limit: float,
    cluster: Cluster,
    plan: Callable[[Cluster], Plan | None] | None = None,
) -> OverBudgetError:
    """The error where no plan fits; `least` is the plan of least memory, if any was found.

    `plan` plans for other clusters, to find out how many devices would do.
    """
    argument = _each(limit, cluster)
    if least is None:
        return OverBudgetError(
            explain(argument, str(error), "", "give each device more memory, or plan for more devices")
        )
    requirement = largest_holders(least)
    if least.offloaded:
        requirement += f"; {nbytes(sum(least.offloaded_nbytes))} of state are with the host between steps"
    remedies = [_more_memory(least, limit, cluster)]
    if plan is not None:
        remedies.extend(_more_devices(cluster, plan))
    return OverBudgetError(
        explain(
            argument,
            f"the plan of least memory found needs {nbytes(least.peak_nbytes)} ({requirement})",
            f"it has {_form(least)} on mesh ({least.mesh})",
            f"what would do, as planned: {', or '.join(remedies)}; a smaller batch or model needs less as well",
        ),
        least_memory_plan=least,
    )


def largest_holders(plan: AnyPlan) -> str:
    """The holders of a device's memory at the peak as text, largest first, without those of 1 % or less."""
    smallest = plan.peak_nbytes / 100
    causes = sorted(((size, cause) for cause, size in plan.nbytes.items() if size > smallest), reverse=True)
    return ", ".join(f"{nbytes(size)} of {cause}" for size, cause in causes)


def device_memory_nbytes(cluster: Cluster) -> float:
    """Bytes of a device's own memory; infinite for virtual CPU devices, which share their machine's."""
    device = cluster.group().device
    return math.inf if device.name == CPU else float(device.memory_nbytes)


def allowed(cluster: Cluster, memory_limit: float | None) -> tuple[float, str]:
    """(bytes that a device may need, in words): the user's limit, else the device's own memory; no words where there is
    none.
    """
    if memory_limit is not None:
        return memory_limit, f"memory_limit={memory_limit:,} bytes"
    device_nbytes = device_memory_nbytes(cluster)
    if math.isinf(device_nbytes):
        return device_nbytes, ""
    return device_nbytes, f"cluster {cluster.name!r}, whose devices have {nbytes(device_nbytes)} each"


def check(plan: AnyPlan, cluster: Cluster, memory_limit: float | None, where: str) -> None:
    """Raises OverBudgetError for a plan that needs more than the user's limit, or than a device has.

    `where` is the function in the user's source.
    """
    limit, description = allowed(cluster, memory_limit)
    if plan.peak_nbytes <= limit:
        return
    needed = f"{plan.peak_nbytes:,} bytes ({nbytes(plan.peak_nbytes)})"
    raise OverBudgetError(
        explain(
            description,
            f"the plan {plan.planner!r} needs {needed} on a device ({largest_holders(plan)})",
            where,
            "use planner=autopar.Auto(), which looks for a plan that fits, give it more devices or a smaller batch, or "
            f"plan for what is not there with memory_limit={plan.peak_nbytes:,} (bytes)",
        ),
        least_memory_plan=plan,
    )


def stages_infeasible_error(
    refused: PlanningError, staged: PipelinePlan | None, limit: float, cluster: Cluster
) -> PlanningError:
    """The error where neither plans without stages nor `staged` ones fit, by the one of less memory."""
    least: AnyPlan | None = getattr(refused, "least_memory_plan", None)
    if staged is None or (least is not None and least.peak_nbytes <= staged.peak_nbytes):
        return refused
    argument = _each(limit, cluster)
    variant = f"{count(len(staged.stages), 'stage')}, {count(staged.microbatches, 'microbatch', 'microbatches')}"
    return OverBudgetError(
        explain(
            argument,
            f"the plan of least memory found needs {nbytes(staged.peak_nbytes)}",
            f"it is a pipeline of {variant} under {staged.schedule_name}",
            f"what would do, as planned: {_more_memory(staged, limit, cluster)}; "
            "more devices, a smaller batch or model need less as well",
        ),
        least_memory_plan=staged,
    )


def _form(plan: Plan) -> str:
    """The variant of a plan in words."""
    microbatches = count(plan.microbatches, "microbatch", "microbatches")
    if not plan.remat:
        return microbatches
    n_recomputed = sum(choice == "inputs" for choice in plan.remat)
    return f"{microbatches}, {count(n_recomputed, 'layer')} of {len(plan.remat)} keeping inputs alone"


def _each(limit: float, cluster: Cluster) -> str:
    """The devices and the bytes that each has for the program, as text; a prediction may be `limit`."""
    allowed_nbytes = round(limit * (1 + margin_of(cluster.group().device)))
    return f"{count(cluster.n_devices, 'device')} with {nbytes(float(allowed_nbytes))} each for the program"


def _more_memory(least: AnyPlan, limit: float, cluster: Cluster) -> str:
    """The memory that the plan of least memory lacks, and the `memory_limit` that would do, as text."""
    above = 1 + margin_of(cluster.group().device)
    missing, enough = math.ceil(above * (least.peak_nbytes - limit)), math.ceil(above * least.peak_nbytes)
    return f"{nbytes(float(missing))} more on each device (memory_limit={enough:,} bytes)"


def _more_devices(cluster: Cluster, plan: Callable[[Cluster], Plan | None]) -> Iterator[str]:
    """The fewest of `_TIMES` as many devices that hold a plan, as text; empty where none do."""
    for times in _TIMES:
        larger = _times(cluster, times)
        try:
            more = plan(larger)
        except OverBudgetError:
            continue
        except PlanningError:  # a mesh that the user fixed, or the program's own, takes the devices that there are
            return
        if more is not None:
            yield f"{count(larger.n_devices, 'device')} ({nbytes(more.peak_nbytes)} each)"
            return


def _times(cluster: Cluster, times: int) -> Cluster:
    """The cluster with several times as many hosts."""
    group = cluster.group()
    hosts = group.hosts * times
    return Cluster(name=f"{cluster.name} x {times}", groups=(replace(group, hosts=hosts),))
