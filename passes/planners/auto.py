"""The planner `Auto`: group operators, lay out a mesh, tabulate strategies, solve, and extract the plan.

Files are of `passes/`:

    group      light operators follow heavy ones                                    placement/operator_groups.py
    enter      bodies of loops and branches join the program by ports               ir/control.py
    lay out    every way to arrange the devices as one or two axes                  intra_op/meshes.py
    tabulate   each operator group's legal shardings, priced, and reshardings       intra_op/build_problem.py
    solve      one strategy per operator group at the least total seconds           solver/search.py
    compare    hand-made plans where a gap is left or memory binds                  intra_op/hand_made.py
    extract    placements, then the moves between them, then collectives and bytes  intra_op/extract.py

and where that does not fit in memory:

    forbid     what is live at the peak becomes a row of the program                intra_op/memory_limit.py
    vary       more microbatches; layers that keep less and compute again           intra_op/variants.py
    explain    how much is missing, what holds it, and what would help              planners/infeasible.py

and for a pipeline, around that:

    microbatch the batch axis in time: what is once before, a loop, once after      transforms/microbatch.py
    sample     equal blocks are found, and prices on a step with few of them        layers/sampling.py
    layers     runs of blocks, or places in the forward pass that few bytes cross   layers/repeats.py, layers/cuts.py
    price      each block as a stage of its own, on every mesh that may be best     pipeline/stage_table.py
    share      prices and plans of stages are found by several processes            pipeline/workers.py
    partition  layers, submeshes, microbatches and schedules into stages            inter_op/partitions.py
    draft      those stages and every hand-made pipeline, under every schedule      pipeline/drafts.py
    cut        each stage as a program with a loop, planned by the path above       transforms/stages.py
    simulate   tasks in the order of the schedule, transfers between them           inter_op/simulator.py

Hand-made planners run the same path on one mesh and under restrictions of their own (intra_op/restrictions.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from passes.cluster import Cluster, Mesh
from passes.errors import InternalError, NoLegalPlanError, OverBudgetError, PlanningError, explain
from passes.inter_op import SCHEDULES
from passes.intra_op import (
    MeshProblems,
    MeshSearch,
    VariantTrials,
    cheapest_variant,
    for_constraints,
    layouts,
    pins,
    restrictions,
)
from passes.ir import Graph, has_effect
from passes.limits import Limits
from passes.memory import margin_of
from passes.pipeline import Sample, SearchOptions, StagedSearch, StagedVariants, layers_of, samples_of, weigh_on
from passes.plan import INTERRUPTED, Alternative, AnyPlan, PipelinePlan, Plan
from passes.planners.checks import (
    check_counts,
    check_optional_counts,
    check_seconds,
    check_solver,
    checked_schedules,
    set_integers,
)
from passes.planners.infeasible import infeasible_error, stages_infeasible_error
from passes.planners.planner import PLAIN, Planned, PlanOptions, limit_nbytes, takes_graphs
from passes.progress import Deadline, SearchContext
from passes.solver import SolverOptions
from passes.step import Step, Variant

LAYERS = 8
"""The number of layers of a forward pass if the user names none."""

RESERVE = 0.06
"""The share of a device's memory that is left to the framework, its communicators and fragmentation, chosen: of 16 GiB
it is 1 GiB. Where predictions are less certain than that, their margin is left (`passes.memory.margin_of`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """The planner that searches for the cheapest plan: placements on the best mesh of at most `max_axes` axes, and
    stages.

    With `pipeline`, stages are searched too: the forward pass is grouped into `layers`, or fewer, and numbers of
    microbatches and `schedules` (by default all) are tried; hand-made pipelines are among what is compared. Plans
    without stages compete in all variants of the step; for a deep model that repeats itself only if their price is near
    that of stages, or if no stages fit. A large model takes minutes. By default there are 8 layers, or up to 32 for a
    deep model that repeats itself. With `stages` there are that many, whether they pay or not.

    No device may need more than `memory_limit` (bytes, or text such as `"12 GiB"`), by default its own memory less a
    reserve of 6 %; what the compiler of a GPU or TPU may need beyond a prediction is within the limit, too. Where the
    step as it is written does not fit, it is tried in more microbatches and with less kept for the backward pass.
    Layers in a loop are tried with less kept in any case, as that may be faster than stacking what they keep. Stages
    keep less where memory is short, unless the step decides it by `jax.checkpoint`. The search ends after a fixed
    amount of work, so that a plan does not depend on how busy the machine is. With `seconds` it also ends by then, once
    a plan fits; its `solution.status` is `time limit` if there was more to try.

    Inputs whose names match one of the `pins`, such as `{"params/*/mlp/kernel": P(None, "x")}`, have that placement,
    and the rest is solved for around them. With a `mesh`, such as `{"data": 4, "model": 2}`, no other mesh is tried for
    plans without stages, and its axes have these names. Plans use no kind of collective that is in `forbid`, or not in
    `allow`: `{"all_to_all"}`.

    If `interruptible`, Ctrl-C ends the search as soon as there is a plan; its `solution.status` is then `interrupted`.
    """

    max_axes: int = 2
    memory_limit: int | str | None = None
    pipeline: bool = False
    layers: int | None = None
    schedules: tuple[str, ...] = ()
    seconds: float | None = None
    solver: SolverOptions = field(default_factory=SolverOptions)
    pins: pins.Pins | Mapping[str, object] | None = ()
    mesh: tuple[tuple[str, int], ...] | Mapping[str, int] | None = ()
    stages: int | None = None
    allow: Iterable[str] | None = None
    forbid: Iterable[str] = ()
    interruptible: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_options(self)
        object.__setattr__(self, "schedules", checked_schedules("Auto", self.schedules))
        object.__setattr__(self, "memory_limit", limit_nbytes(self.memory_limit))
        object.__setattr__(self, "pins", pins.checked_pins(self.pins))
        object.__setattr__(self, "mesh", pins.checked_mesh(self.mesh))
        object.__setattr__(self, "forbid", pins.checked_kinds(self.allow, self.forbid))
        object.__setattr__(self, "allow", None)

    @property
    def pieces(self) -> int:
        """The number of layers into which a forward pass is cut that does not repeat itself."""
        return self.layers or LAYERS

    def searches(self, cluster: Cluster) -> bool:
        """Whether stages are searched on this cluster."""
        return (self.pipeline or self.stages is not None) and cluster.n_devices > 1

    @takes_graphs
    def plan(self, step: Step, cluster: Cluster, options: PlanOptions = PLAIN) -> Planned:
        """The cheapest plan of any variant of the step. Raises OverBudgetError where none fits; the message says what
        would help.
        """
        memory_limit = limit_nbytes(options.memory_limit, self.memory_limit)
        planner = replace(self, memory_limit=memory_limit)
        deadline = Deadline(self.seconds)
        context = SearchContext(report=options.report, deadline=deadline, interruptible=self.interruptible)
        if self.searches(cluster) and _has_stages(step.graph):
            plan = planner.search(step, cluster, context)
        else:
            plan = planner.choose(step, cluster, context)
        return Planned.of(plan, step.variant(plan.variant(self.pieces)), searched=True, memory_limit=memory_limit)

    def choose(self, step: Step, cluster: Cluster, context: SearchContext) -> Plan:
        """The cheapest plan of a step, without stages, in any of its variants. Raises OverBudgetError."""
        began, limits = time.perf_counter(), _limits(self, cluster)
        trials = VariantTrials(
            step=step,
            limits=limits,
            search=lambda step, offload, most_nbytes, part: self.mesh_search(step, cluster, part, offload, most_nbytes),
            context=context,
        )
        try:
            plan = cheapest_variant(trials)
            return replace(plan, solution=plan.solution.took(time.perf_counter() - began))
        except OverBudgetError as error:
            least = cast("Plan | None", error.least_memory_plan)

            def elsewhere(cluster: Cluster) -> Plan | None:
                """The variant of least memory on another cluster."""
                variant = step.variant(least.variant() if least else Variant())
                offload = bool(least and least.offloaded)
                search = self.mesh_search(variant, cluster, context, offload, most_nbytes=limits.searched)
                return search.cheapest_within(limits)

            raise infeasible_error(error, least, limits.searched, cluster, elsewhere) from None

    def limit(self, cluster: Cluster) -> float:
        """Bytes that a searched plan may be predicted to need on one device."""
        return _limits(self, cluster).searched

    def mesh_search(
        self, step: Step, cluster: Cluster, context: SearchContext, offload: bool, most_nbytes: float
    ) -> MeshSearch:
        """The search over every mesh that may have a plan of at most `most_nbytes`; the plans found may need more."""
        graph = step.graph
        types = [graph.types[v] for v in graph.inputs]
        chosen = pins.placed_inputs(cast("pins.Pins", self.pins), graph.input_names, types)
        restrict = partial(pins.pinned, chosen=chosen) if chosen else None
        problems = MeshProblems(step=step, offload=offload, restrict=restrict)
        search = MeshSearch(
            planner="auto",
            problems=problems,
            # Hand-made plans know nothing of pins.
            hand_made_plans=(lambda mesh: ()) if chosen else partial(restrictions.hand_made_plans, batch=step.batch),
            options=self.solver,
            most_nbytes=most_nbytes,
            context=context,
        )
        constrained = [] if self.mesh else for_constraints(graph, cluster, self.max_axes)
        kinds = cast("tuple[str, ...]", self.forbid)
        try:
            search.over([pins.without(m, kinds) for m in constrained] or self._laid_out(cluster, cluster.n_devices))
        except NoLegalPlanError as error:
            raise (_without(kinds, error) if kinds else error) from None
        return search

    def search(self, step: Step, cluster: Cluster, context: SearchContext) -> AnyPlan:
        """The cheapest plan, of those without stages by `choose` and of those in stages of the `step`.

        Raises OverBudgetError where nothing fits, with the plan of least memory of all.
        """
        samples = samples_of(step, self.pieces)
        layers = layers_of(samples, self.layers, LAYERS, weigh_on(cluster))
        if self.stages is not None and layers < self.stages:
            raise _too_many(self.stages, layers)
        if layers < 2:  # it has no batch, or cannot be cut
            return self.choose(step, cluster, context)
        pins.ByName(cast("pins.Pins", self.pins)).check(step.graph)
        whole: Plan | None = None
        refused: PlanningError | None = None
        staged: PipelinePlan | None = None
        is_deep = any(any(sample.left_out) for sample in samples.values())
        if not is_deep and not self.stages:
            try:
                whole = self.choose(step, cluster, context)
            except PlanningError as error:
                refused = error
            if context.is_interrupted:
                return _or_raise(whole, refused)
        best_seconds, cutoff = (whole.step_seconds, whole.step_seconds) if whole else (None, math.inf)
        part = context.part("stages", best=lambda _: best_seconds)
        staging = self._staging(cluster, step, samples, layers, part)
        with context.ending_early():
            try:
                staged = staging.run(cutoff)
                context.raise_if_interrupted()
                if is_deep and not self.stages and (staged is None or staging.rivals(staged.step_seconds)):
                    whole = self.choose(step, cluster, context)
            except PlanningError as error:
                refused = refused or error
        plans: list[AnyPlan] = [plan for plan in (whole, staged) if plan is not None]
        best = min(plans, key=lambda plan: plan.step_seconds, default=None)
        if context.is_interrupted:
            return context.kept(best).ended(INTERRUPTED)
        refused = refused or (_unfit(self.stages) if self.stages else None)
        if best is None and refused is not None:
            raise stages_infeasible_error(refused, staging.least_memory_plan, self.limit(cluster), cluster)
        taken = _or_raise(best, refused)
        return taken.beside([*staging.met, *(_met(plan) for plan in plans if plan is not taken)])

    def _staging(
        self, cluster: Cluster, step: Step, samples: dict[int, Sample], layers: int, context: SearchContext
    ) -> StagedVariants:
        """The search over stages of a step cut into these layers."""
        options = SearchOptions(
            cluster=cluster,
            stages=self.pieces,
            schedules=self.schedules or tuple(SCHEDULES),
            limits=_limits(self, cluster),
            solver=self.solver,
            meshes=lambda n_devices: self._laid_out(cluster, n_devices),
            pinned=pins.ByName(cast("pins.Pins", self.pins)) if self.pins else None,
            counts=(self.stages,) if self.stages else (),
        )
        begin, weigh = partial(StagedSearch, options=options), weigh_on(cluster)
        return StagedVariants(
            step=step, samples=samples, stages=self.pieces, layers=layers, weigh=weigh, begin=begin, context=context
        )

    def _laid_out(self, cluster: Cluster, n_devices: int) -> list[Mesh]:
        """The meshes of that many devices that may be the fastest, or the one that the user named."""
        forbidden = cast("tuple[str, ...]", self.forbid)
        if self.mesh:
            axes = cast("Sequence[tuple[str, int]]", self.mesh)
            return [pins.without(pins.mesh_named(cluster, axes), forbidden)]
        return [pins.without(mesh, forbidden) for mesh in layouts(cluster, n_devices, self.max_axes)]


def _limits(planner: Auto, cluster: Cluster) -> Limits:
    """The bytes that plans may be predicted to need on one device, by default its memory less the reserve.

    The compiled program of a plan may need a margin more; of a limit that the user gave, hand-made plans may need all.
    """
    device, memory_limit = cluster.group().device, limit_nbytes(planner.memory_limit)
    margin = margin_of(device)
    if memory_limit is None:
        return Limits.equal(min(1 - RESERVE, 1 / (1 + margin)) * device.memory_nbytes)
    return Limits(searched=memory_limit / (1 + margin), hand_made=float(memory_limit))


def _check_options(planner: Auto) -> None:
    """Raises PlanningError for numbers that are not valid, and for a `mesh` together with stages."""
    check_counts(planner, "max_axes")
    check_optional_counts(planner, "layers")
    set_integers(planner, "stages")
    check_seconds(planner.seconds)
    check_solver("Auto", planner.solver)
    if planner.stages is not None and (type(planner.stages) is not int or planner.stages < 2):
        rule = "a pipeline has two stages or more"
        raise PlanningError(explain(f"Auto(stages={planner.stages!r})", rule, "", "leave it out for none"))
    if (planner.pipeline or planner.stages) and planner.mesh:
        rule = "a mesh is of plans without stages, and these search stages, each on a mesh of its own"
        remedy = "leave out mesh=, or write Pipeline(stages=, meshes=) with a mesh for each"
        raise PlanningError(explain("Auto(pipeline=True, mesh=)", rule, "", remedy))


def _too_many(stages: int, layers: int) -> PlanningError:
    """The error of more stages than a step can be cut into."""
    rule = f"the step can be cut into {layers} layers at most"
    remedy = (
        f"stages={layers} or fewer, or none" if layers > 1 else "leave it out: there is no batch, or no place to cut"
    )
    return PlanningError(explain(f"Auto(stages={stages})", rule, "", remedy))


def _unfit(stages: int) -> OverBudgetError:
    """The error where no pipeline of `stages` stages was found that keeps the limit."""
    rule = "no pipeline of so many stages was found that keeps the memory limit"
    return OverBudgetError(explain(f"Auto(stages={stages})", rule, "", "leave it out, or allow more memory or devices"))


def _without(forbidden: tuple[str, ...], error: NoLegalPlanError) -> NoLegalPlanError:
    """The error for a step that no plan computes without these kinds of collectives."""
    rule = "no placement of the step's operators does without these kinds of collectives"
    if set(forbidden) == set(pins.KINDS):
        rule = "these are all kinds of collectives there are: nothing can be moved, and the step cannot do without"
    remedy = f"allow one of {', '.join(forbidden)}, or fewer devices: on one, nothing is moved"
    return NoLegalPlanError(explain(f"Auto(forbid={list(forbidden)})", rule, str(error), remedy))


def _has_stages(graph: Graph) -> bool:
    """Whether a program may be cut into stages, which have no callbacks, and devices of their own."""
    return not graph.pinned and not any(map(has_effect, graph.nodes))


def _met(plan: AnyPlan) -> Alternative:
    """A plan as an alternative that was not taken."""
    why = "the best of its kind, and takes longer"
    return Alternative(name=plan.shape, seconds=plan.step_seconds, why=why, peak_nbytes=plan.peak_nbytes)


def _or_raise(plan: AnyPlan | None, refused: PlanningError | None) -> AnyPlan:
    """The plan; raises the error where there is none."""
    if plan is None:
        raise refused or InternalError("neither a plan nor a reason why there is none")
    return plan
