"""The plans of the stages of drafts, as they are; equal stages are planned once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from passes.cluster import Cluster
from passes.inter_op import is_chunked
from passes.intra_op import Form
from passes.ir import Graph, StatePairs
from passes.pipeline.assemble import joined, restated
from passes.pipeline.drafts import Draft
from passes.pipeline.samples import Step
from passes.pipeline.segments import Needs
from passes.pipeline.stage_table import StageCosts
from passes.pipeline.workers import Crew
from passes.plan import PipelinePlan, Plan
from passes.progress import Progress, Report
from passes.solver import SolverOptions
from passes.transforms import Part, Stages, stages

NEAR = 1e-3
"""The relative gap at which the solve of a stage may end: closing it takes longer than all that comes before."""


@dataclass(slots=True, kw_only=True)
class StagePlans:
    """Plans drafts of a `step` for devices that have `limit` bytes, with what was planned for other drafts.

    Work is shared by a crew on drafts of the `shared` prices.
    """

    step: Step
    cluster: Cluster
    schedules: Sequence[str]
    limit: float
    solver: SolverOptions
    shared: StageCosts
    report: Report
    _needs: dict[object, Needs] = field(default_factory=dict[object, Needs])
    _plans: dict[object, tuple[Part, Plan]] = field(default_factory=dict[object, "tuple[Part, Plan]"])

    def graph(self, microbatches: int) -> Graph:
        self.report(Progress(phase="write the step in microbatches", done=0, total=None))
        return self.step.graph(microbatches)

    def plan(self, draft: Draft, crew: Crew) -> PipelinePlan:
        """A draft with its stages planned as they are, under the schedule that is the best then."""
        graph, shape = self.graph(draft.microbatches), draft.shape
        begins = draft.table.step.firsts(graph, shape.begins, draft.microbatches)
        cut = stages.cut(graph, begins, self.step.state_pairs)
        state_pairs = [stages.state_pairs_of(part, graph, self.step.state_pairs) for part in cut.parts]
        given = [stages.donations(part, graph, self.step.donated) for part in cut.parts]
        plans = self._stages(draft, cut, state_pairs, given, crew)
        made = joined(
            "auto",
            graph,
            self.cluster,
            self.step.state_pairs,
            self.step.donated,
            cut,
            begins,
            plans,
            draft.schedule,
            shape.chunks,
            self._needs,
        )
        under = (replace(made, schedule_name=name) for name in self.schedules if is_chunked(name) == (made.chunks > 1))
        return min(under, default=made, key=lambda one: (one.peak_nbytes > self.limit, one.step_seconds))

    def _stages(
        self,
        draft: Draft,
        cut: Stages,
        state_pairs: Sequence[StatePairs],
        given: Sequence[tuple[bool, ...]],
        crew: Crew,
    ) -> list[Plan]:
        """The plan of every stage; equal ones are planned once, in this draft or another."""
        count, shape, table = draft.microbatches, draft.shape, draft.table
        ends = (*shape.begins[1:], len(table.step.cuts(count).blocks))
        sizes = [shape.devices[stage % len(shape.devices)] for stage in range(len(ends))]
        laid_out = [table.near(*run, count) for run in zip(shape.begins, ends, sizes, strict=True)]
        self._tell_stage(0, len(ends))
        keys: list[object] = [
            (part.graph.fingerprint, own, gone, tuple(meshes))
            for part, own, gone, meshes in zip(cut.parts, state_pairs, given, laid_out, strict=True)
        ]
        options = replace(self.solver, gap=max(self.solver.gap, NEAR))
        left = {key: stage for stage, key in reversed(list(enumerate(keys))) if key not in self._plans}
        tasks = [
            (
                f"stage {at}",
                Form(graph=cut.parts[at].graph, state_pairs=state_pairs[at], donated=given[at]),
                laid_out[at],
                options,
            )
            for at in left.values()
        ]
        is_shared = table is self.shared
        planned = crew.call("plan", tasks) if is_shared else [table.pricer.plan(*task) for task in tasks]
        self._plans |= {key: (cut.parts[at], plan) for (key, at), plan in zip(left.items(), planned, strict=True)}
        plans: list[Plan] = []
        for stage, key in enumerate(keys):
            part, plan = self._plans[key]
            if part is not cut.parts[stage]:
                plan = restated(plan, part.graph, cut.parts[stage].graph, state_pairs[stage], given[stage])
                plan = replace(plan, solution=replace(plan.solution, planner=f"stage {stage}"))
            plans.append(plan)
        return plans

    def _tell_stage(self, done: int, total: int) -> None:
        self.report(Progress(phase="plan the stages chosen", done=done, total=total))
