"""A step's plan: from the cache, or by the planner; checked, and bound to the function's arguments and results."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, cast

from autopar import errors
from autopar.cache import key_of, relocated
from autopar.distributed import Processes, digest_of
from autopar.errors import ArgumentError, explain
from autopar.frontend import Traced
from autopar.options import Settings
from autopar.plan import Leaves, PipelinePlan, Plan, bound, joined_spec, partition_specs
from autopar.rewrite import TracedStep
from autopar.runtime import Pieces
from passes.cluster import Cluster
from passes.errors import PlanningError
from passes.intra_op import slow_dtype
from passes.ir import Graph, StatePairs
from passes.pipeline import layered
from passes.plan import AnyPlan, plan_from_json
from passes.plan import json as plan_json
from passes.planners import Manual, Planned, Planner, PlanOptions, infeasible
from passes.progress import silent
from passes.sharding import ShardingSpec, spec_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A plan with the program that it plans; some of the program's arguments are chunks of the caller's (`pieces`).

    If it was `searched` for, another plan may need less memory; `memory_limit` is the user's, in bytes.
    """

    plan: Plan | PipelinePlan
    traced: Traced
    pieces: Pieces | None
    searched: bool
    memory_limit: int | None


def choose(
    step: TracedStep,
    cluster: Callable[[], Cluster],
    settings: Settings,
    source: str,
    processes: Processes | None = None,
) -> Chosen:
    """The plan of a step, which is written at `source`; of several processes, that of the first.

    Raises PlanningError where there is none.
    """
    if processes is None:
        planned = _planned(step, cluster(), settings, source)
    else:
        planned = _together(step, cluster, settings, source, processes)
    variant = cast("TracedStep", planned.step)
    plan = bound(planned.plan, _shardings(planned.plan, variant, step.traced))
    limit = settings.memory_limit if planned.memory_limit is None else planned.memory_limit
    return Chosen(
        plan=plan, traced=variant.traced, pieces=variant.pieces, searched=planned.searched, memory_limit=limit
    )


def agree(processes: Processes, step: TracedStep, plan: AnyPlan | None, source: str) -> None:
    """Raises DisagreementError, on all processes, if their programs, constants or plans differ."""
    items = {
        "the program": step.graph.fingerprint,
        "what it holds constant": digest_of(" ".join(map(digest_of, step.traced.constants))),
        "the plan": digest_of(json.dumps(plan.to_json(), sort_keys=True)) if plan else "not of this program",
    }
    remedy = "run the same script, with the same arguments, on every process"
    try:
        processes.agree("the step", items, source, remedy)
    except errors.DisagreementError:  # all come here together, and look for the first operator that differs
        lines = step.graph.format().splitlines()
        processes.agree("the program", {f"line {n}": line for n, line in enumerate(lines, 1)}, source, remedy)
        raise


def _together(
    step: TracedStep, cluster: Callable[[], Cluster], settings: Settings, source: str, processes: Processes
) -> Planned:
    """The plan that the first process makes, on all processes; an error that it raises is raised on all."""
    failures: list[Exception] = []

    def made() -> str:
        try:
            planned = _planned(step, cluster(), settings, source)
        except Exception as error:  # whatever it is, the others would wait for a plan
            failures.append(error)
            return json.dumps({"failure": type(error).__name__, "message": str(error)})
        return json.dumps({"plan": planned.plan.to_json(), "how": _how(planned)})

    shared = json.loads(processes.broadcast("the plan", made))
    if failures:
        raise failures[0]
    if "failure" in shared:
        kind = getattr(errors, shared["failure"], None)
        kind = kind if isinstance(kind, type) and issubclass(kind, PlanningError) else PlanningError
        raise kind(f"process {processes.ranks[0]}: {shared['message']}")
    how = plan_json.as_object(shared["how"], "how")
    try:
        planned = _restored(step, plan_from_json(shared["plan"]), how)
    except PlanningError:
        planned = None
    if planned is None:
        agree(processes, step, None, source)
        rule = "its plan cannot be read here, where the program is the same"
        remedy = "install the same version of autopar on every process"
        raise errors.DisagreementError(explain(f"process {processes.ranks[0]}", rule, source, remedy))
    return planned


def _how(planned: Planned) -> Mapping[str, object]:
    """The planner, options and limit that a plan was made with, as plain data."""
    stages = planned.step.chosen.stages
    return {"stages": stages, "searched": planned.searched, "memory_limit": planned.memory_limit}


def _warn_of_dtype(graph: Graph, cluster: Cluster, source: str) -> None:
    """Warns of products in a dtype for which a device has no units."""
    for device in {group.device.name: group.device for group in cluster.groups}.values():
        if (slow := slow_dtype(graph, device)) is not None:
            dtype, rate, better, best = slow
            numbers = f"{device.name} has no units for it: {rate / 1e12:.3g} TFLOP/s, and {best / 1e12:.3g} in {better}"
            remedy = f"compute in {better}, or on devices that have {dtype}"
            warnings.warn(explain(f"products in {dtype}", numbers, source, remedy), stacklevel=5)


def _planned(step: TracedStep, cluster: Cluster, settings: Settings, source: str) -> Planned:
    """The plan made in this process; warns where the step computes slowly."""
    _warn_of_dtype(step.graph, cluster, source)
    return _cached(step, cluster, settings, source)


def _shardings(plan: AnyPlan, step: TracedStep, traced: Traced) -> tuple[Leaves, Leaves]:
    """A PartitionSpec for each argument and result, in the pytrees of the function as it was traced."""
    stacked = step.traced.stacked
    inputs, outputs = plan.specs(step.graph, step.state_pairs)
    rows = [ShardingSpec(dims=spec.dims[1:]) if i in stacked else spec for i, spec in enumerate(inputs)]
    counts = (step.pieces.inputs, step.pieces.outputs) if step.pieces else ((1,) * len(inputs), (1,) * len(outputs))
    arguments, results = (
        tuple(joined_spec(list(islice(specs, count))) for count in each)
        for each, specs in zip(counts, map(iter, (partition_specs(rows), partition_specs(outputs))), strict=True)
    )
    return (traced.in_tree, arguments), (traced.out_tree, results)


def _cached(step: TracedStep, cluster: Cluster, settings: Settings, source: str) -> Planned:
    """The cached plan of the step; otherwise the planner's, which is then written to the cache."""
    if settings.cache is None:
        return _made(step, cluster, settings, source)
    options = {
        "microbatches": settings.microbatches,
        "microbatch_semantics": settings.microbatch_semantics,
        "memory_limit": settings.memory_limit,
        "remat": step.chosen.kept,
    }
    key = key_of(step, cluster, settings.planner, options)
    if key is None:
        return _made(step, cluster, settings, source)
    planned = settings.cache.read(key, partial(_restored, step))
    if planned is None:
        planned = _made(step, cluster, settings, source)
        settings.cache.write(key, planned.plan, _how(planned))
    return planned


def _restored(step: TracedStep, plan: AnyPlan, how: plan_json.Fields) -> Planned | None:
    """A plan from the cache, and the variant of the step that it plans.

    None where lines of the source have changed so that the plan cannot name them. Raises PlanningError for a plan of
    another step.
    """
    restored = step.variant(plan.variant(how.int("stages")))
    plan.check(restored.graph, restored.state_pairs)
    relocated_plan = relocated(plan, restored.traced)
    if relocated_plan is None:
        return None
    limit = None if how.of("memory_limit") is None else how.int("memory_limit")
    return Planned(plan=relocated_plan, step=restored, searched=how.of("searched") is True, memory_limit=limit)


def _made(step: TracedStep, cluster: Cluster, settings: Settings, source: str) -> Planned:
    """The planner's plan of the step. Raises ArgumentError for anything else that it returns."""
    planner = _planner(settings, cluster)
    options = PlanOptions(memory_limit=settings.memory_limit, report=settings.progress or silent)
    planned = cast("Any", planner.plan(step, cluster, options))
    where = f"{type(planner).__name__}.plan(step, cluster, options)"
    remedy = "return what another planner returns, or autopar.Planned.of(plan, step) with a variant of the given step"
    if not isinstance(planned, Planned):
        raise ArgumentError(explain(where, f"it returned {planned!r:.60}, no autopar.Planned", source, remedy))
    variant, plan = planned.step, planned.plan
    if not isinstance(variant, TracedStep) or variant.family is not step.family:
        raise ArgumentError(explain(where, "it returned the plan of another step than it was given", source, remedy))
    if plan.fingerprint != variant.graph.fingerprint:
        rule = f"it returned plan {plan.fingerprint} with a step of program {variant.graph.fingerprint}"
        raise ArgumentError(explain(where, rule, source, remedy))
    _check_pinned(plan, variant.graph, variant.state_pairs, source)
    if not planned.searched:
        infeasible.check(plan, cluster, settings.memory_limit, f"at {source}" if source else "")
    return replace(planned, plan=layered(plan, variant))


def _planner(settings: Settings, cluster: Cluster) -> Planner:
    """The planner; if the user names a cluster, the seconds of a saved plan are counted for it.

    Raises PlanningError where a saved plan cannot be read or has more devices.
    """
    planner = settings.planner
    return planner.on(cluster) if settings.cluster is not None and isinstance(planner, Manual) else planner


def _check_pinned(plan: AnyPlan, graph: Graph, state_pairs: StatePairs, source: str) -> None:
    """Raises PlanMismatchError unless the plan has inputs where the user has placed them."""
    remedy = "leave it out of in_shardings and placed=, or choose a planner that takes it there, such as Auto()"
    (inputs, _), mesh = plan.specs(graph, state_pairs), plan.programs[0].mesh
    for position, placement in graph.pinned.items():
        name = f"{graph.input_names[position]} {graph.types[graph.inputs[position]]}"
        if plan.timeline is not None:
            rule = f"the user places it on {placement.devices} devices, and each stage of a pipeline has its own"
            raise errors.PlanMismatchError(explain(name, rule, source, remedy))
        is_read = graph.inputs[position] in graph.consumers or graph.inputs[position] in graph.outputs
        if is_read and inputs[position] != spec_on(placement, mesh):
            rule = f"the plan reads it as {inputs[position]} on mesh {mesh}, and it arrives as {placement}"
            raise errors.PlanMismatchError(explain(name, rule, source, remedy))
