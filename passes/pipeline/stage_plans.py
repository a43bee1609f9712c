"""The plans of the stages of drafts; equal stages are planned once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from passes.errors import InternalError
from passes.inter_op import StageCost, is_chunked
from passes.pipeline import prefetch
from passes.pipeline.assemble import PipelineOptions, assemble_pipeline, restated
from passes.pipeline.draft_prices import runs_of
from passes.pipeline.search_options import SearchOptions
from passes.pipeline.shapes import Draft
from passes.plan import PipelinePlan, Plan
from passes.progress import Progress, SearchContext
from passes.step import Step, Variant
from passes.transforms import stages

SOLVE_GAP = 1e-3
"""The relative gap to which a stage is solved: closing it takes longer than all that comes before."""

NEARLY, TIGHTENED = 1.1, 2
"""The factor of the limit up to which a plan's stages are planned again within fewer bytes, and the number of times:
prices leave out working space, and a stage within fewer bytes may keep more of each microbatch.
"""


@dataclass(slots=True, kw_only=True)
class StagePlans:
    """The plans of drafts of a `step`; plans of equal stages are kept."""

    step: Step
    options: SearchOptions
    context: SearchContext
    _costs: dict[object, StageCost] = field(default_factory=dict[object, StageCost])
    _plans: dict[object, tuple[Step, Plan | None]] = field(default_factory=dict[object, "tuple[Step, Plan | None]"])

    def written(self, microbatches: int) -> Step:
        """The whole step in that many microbatches, with no block left out."""
        self.context.report(Progress(phase="write the step in microbatches", done=0, total=None))
        return self.step.variant(Variant(microbatches=microbatches, stages=self.options.stages))

    def plan(self, draft: Draft) -> PipelinePlan:
        """The plan of a draft: its stages planned in full, under the schedule that is the best then.

        Prices leave out working space. If the plan does not fit because of that, the stages that need too much are
        planned again within fewer bytes.
        """
        step, shape = self.written(draft.microbatches), draft.shape
        begins = draft.table.step.firsts(step.graph, shape.begins, draft.microbatches)
        cut = stages.cut(step.graph, begins, step.state_pairs)
        parts = step.parts(cut)
        options = PipelineOptions(
            planner="auto", cluster=self.options.cluster, schedule=draft.schedule, chunks=shape.chunks
        )
        plans, best = self._stages(draft, parts, {}), None
        limit = shape.limit_nbytes(self.options.limits, draft.table)
        for _ in range(1 + TIGHTENED):
            if plans is None:
                break
            made = assemble_pipeline(step, cut, plans, options, self._costs)
            scheduled = self._scheduled(made.of_variant(step.chosen))
            best = min((best, *scheduled) if best else scheduled, key=partial(_order, limit))
            smallest = min(scheduled, key=lambda plan: plan.peak_nbytes)
            if not limit < smallest.peak_nbytes <= NEARLY * limit:
                break
            limit = self.options.limits.searched
            plans = self._stages(draft, parts, _tighter(smallest, limit))
        if best is None:
            raise InternalError("stages without a limit have no plan")
        return best

    def _scheduled(self, plan: PipelinePlan) -> list[PipelinePlan]:
        """The pipeline under each schedule that it can have."""
        names = [name for name in self.options.schedules if is_chunked(name) == (plan.chunks > 1)]
        return [replace(plan, schedule_name=name) for name in names] or [plan]

    def _stages(self, draft: Draft, parts: Sequence[Step], limits: Mapping[int, float]) -> list[Plan] | None:
        """The plan of every stage; equal stages are planned once, in this draft or another.

        `limits` has the most bytes of some stages; equal ones have the least of theirs. None where a stage has no such
        plan.
        """
        count, table = draft.microbatches, draft.table
        runs = runs_of(draft.shape, table, count)
        prefetch.price_near(table, runs, count)
        laid_out = [table.near(*run, count) for run in runs]
        self._report_stage(0, len(runs))
        alike: list[object] = [
            (part.graph.fingerprint, part.state_pairs, part.donated, tuple(meshes), self._pins(part))
            for part, meshes in zip(parts, laid_out, strict=True)
        ]
        least = {key: min(limits[at] for at in limits if alike[at] == key) for key in {alike[at] for at in limits}}
        within = [least[key] if at in limits else math.inf for at, key in enumerate(alike)]
        keys = list(zip(alike, within, strict=True))
        options = replace(self.options.solver, gap=max(self.options.solver.gap, SOLVE_GAP))
        unplanned = {key: stage for stage, key in reversed(list(enumerate(keys))) if key not in self._plans}
        tasks = [(f"stage {at}", parts[at], laid_out[at], options, within[at]) for at in unplanned.values()]
        planned = table.block_costs.plans(tasks)
        self._plans |= {key: (parts[at], plan) for (key, at), plan in zip(unplanned.items(), planned, strict=True)}
        plans: list[Plan] = []
        for stage, (key, stage_step) in enumerate(zip(keys, parts, strict=True)):
            part, plan = self._plans[key]
            if plan is None:
                return None
            if part is not stage_step:
                plan = restated(plan, part.graph, stage_step)
                plan = replace(plan, solution=replace(plan.solution, planner=f"stage {stage}"))
            plans.append(plan)
        return plans

    def _pins(self, part: Step) -> object:
        """The pinned placements of a stage: stages that are equal but for names may differ in these."""
        return tuple(pinned.placed(part.graph).items()) if (pinned := self.options.pinned) else ()

    def _report_stage(self, done: int, total: int) -> None:
        self.context.report(Progress(phase="plan the stages chosen", done=done, total=total))


def _order(limit: float, plan: PipelinePlan) -> tuple[bool, float]:
    """The sort key of plans, best first: the fastest that fits, else the one of least memory."""
    is_over = plan.peak_nbytes > limit
    return is_over, plan.peak_nbytes if is_over else plan.step_seconds


def _tighter(plan: PipelinePlan, limit: float) -> dict[int, float]:
    """The bytes that the stages of groups over the limit may need, less by the group's excess; by stage."""
    limits: dict[int, float] = {}
    for group, nbytes in enumerate(plan.timeline.peak_nbytes):
        if nbytes > limit:
            for stage in range(group, len(plan.stages), plan.groups):
                limits[stage] = plan.stages[stage].peak_nbytes - (nbytes - limit) / plan.chunks
    return limits
