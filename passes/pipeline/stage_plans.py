"""The plans of the stages of drafts; equal stages are planned once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from passes.cluster import Cluster
from passes.inter_op import is_chunked
from passes.pipeline.assemble import assemble_pipeline, restated
from passes.pipeline.drafts import Draft
from passes.pipeline.segments import Needs
from passes.pipeline.stage_table import StageCostTable
from passes.pipeline.workers import WorkerPool
from passes.plan import PipelinePlan, Plan
from passes.progress import Progress, SearchContext
from passes.solver import SolverOptions
from passes.step import Step, Variant
from passes.transforms import stages

SOLVE_GAP = 1e-3
"""The relative gap at which the solve of a stage may end: closing it takes longer than all that comes before."""


@dataclass(slots=True, kw_only=True)
class StagePlans:
    """The plans of drafts of a `step`, in its variants for so many `stages`; those of equal stages are kept.

    Devices have `limit` bytes. Work is shared by a pool on drafts of the `shared` prices.
    """

    step: Step
    stages: int
    cluster: Cluster
    schedules: Sequence[str]
    limit: float
    solver: SolverOptions
    shared: StageCostTable
    context: SearchContext
    _needs: dict[object, Needs] = field(default_factory=dict[object, Needs])
    _plans: dict[object, tuple[Step, Plan]] = field(default_factory=dict[object, "tuple[Step, Plan]"])

    def written(self, microbatches: int) -> Step:
        """The whole step, no block left out, in so many microbatches."""
        self.context.report(Progress(phase="write the step in microbatches", done=0, total=None))
        return self.step.variant(Variant(microbatches=microbatches, stages=self.stages))

    def plan(self, draft: Draft, pool: WorkerPool) -> PipelinePlan:
        """The plan of a draft: its stages planned in full, under the schedule that is the best then."""
        step, shape = self.written(draft.microbatches), draft.shape
        begins = draft.table.step.firsts(step.graph, shape.begins, draft.microbatches)
        cut = stages.cut(step.graph, begins, step.state_pairs)
        plans = self._stages(draft, step.parts(cut), pool)
        made = assemble_pipeline(
            "auto",
            step.graph,
            self.cluster,
            step.state_pairs,
            step.donated,
            cut,
            begins,
            plans,
            draft.schedule,
            shape.chunks,
            self._needs,
        )
        under = (replace(made, schedule_name=name) for name in self.schedules if is_chunked(name) == (made.chunks > 1))
        return min(under, default=made, key=lambda plan: (plan.peak_nbytes > self.limit, plan.step_seconds))

    def _stages(self, draft: Draft, parts: Sequence[Step], pool: WorkerPool) -> list[Plan]:
        """The plan of every stage; equal ones are planned once, in this draft or another."""
        count, shape, table = draft.microbatches, draft.shape, draft.table
        ends = (*shape.begins[1:], len(table.step.cuts(count).blocks))
        sizes = [shape.devices[stage % len(shape.devices)] for stage in range(len(ends))]
        laid_out = [table.near(*run, count) for run in zip(shape.begins, ends, sizes, strict=True)]
        self._report_stage(0, len(ends))
        keys: list[object] = [
            (part.graph.fingerprint, part.state_pairs, part.donated, tuple(meshes))
            for part, meshes in zip(parts, laid_out, strict=True)
        ]
        options = replace(self.solver, gap=max(self.solver.gap, SOLVE_GAP))
        unplanned = {key: stage for stage, key in reversed(list(enumerate(keys))) if key not in self._plans}
        tasks = [(f"stage {at}", parts[at], laid_out[at], options) for at in unplanned.values()]
        is_shared = table is self.shared
        planned = pool.call("plan", tasks) if is_shared else [table.block_costs.plan(*task) for task in tasks]
        self._plans |= {key: (parts[at], plan) for (key, at), plan in zip(unplanned.items(), planned, strict=True)}
        plans: list[Plan] = []
        for stage, (key, stage_step) in enumerate(zip(keys, parts, strict=True)):
            part, plan = self._plans[key]
            if part is not stage_step:
                plan = restated(plan, part.graph, stage_step.graph, stage_step.state_pairs, stage_step.donated)
                plan = replace(plan, solution=replace(plan.solution, planner=f"stage {stage}"))
            plans.append(plan)
        return plans

    def _report_stage(self, done: int, total: int) -> None:
        self.context.report(Progress(phase="plan the stages chosen", done=done, total=total))
