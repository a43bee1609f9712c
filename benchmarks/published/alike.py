"""Megatron's planner, for deep pipelines: stages that are equal are planned once, as in a search over stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes.cluster import Cluster
from passes.errors import PlanningError
from passes.intra_op import best, named, restrictions
from passes.ir import Graph
from passes.layers import stage_cuts
from passes.layers.repeats import blocks
from passes.pipeline import body_of, pipelined
from passes.pipeline.assemble import restated
from passes.plan import Plan
from passes.planners import Megatron, Planned, PlanOptions
from passes.step import Step, seen_by


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepMegatron(Megatron):
    """The plan that `Megatron` makes of a step that is in its variant already, in less time.

    Where `ends_count`, the embedding and the head count as a layer each, and stages have equally many.
    """

    ends_count: bool = False

    def plan(self, step: Step, cluster: Cluster, options: PlanOptions) -> Planned:
        if self.pipeline == 1:
            return Megatron.plan(self, step, cluster, options)
        step = seen_by(step, cluster)
        restrictions.check_sizes({"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}, cluster)
        mesh = named(cluster, ("data", self.data), ("tensor", self.tensor))
        known: dict[object, tuple[Step, Plan]] = {}

        def plan_stage(part: Step, stage: int) -> Plan:
            key, name = (part.graph.fingerprint, part.state_pairs, part.donated), f"stage {stage}"
            if key not in known:
                pairs, given = part.state_pairs, part.donated
                plan = best(name, part.graph, [mesh], pairs, given, self.solver, self.restriction)
                known[key] = part, plan
                return plan
            planned, plan = known[key]
            plan = restated(plan, planned.graph, part.graph, part.state_pairs, part.donated)
            return replace(plan, solution=replace(plan.solution, planner=name))

        firsts = self._firsts(body_of(step.graph))
        schedule = "interleaved" if self.interleave > 1 else self.schedule
        return Planned.of(pipelined(self.name, step, cluster, firsts, schedule, plan_stage, self.interleave), step)

    def _firsts(self, body: Graph) -> tuple[int, ...]:
        """The first body node of each stage. Raises PlanningError for layers that stages do not share evenly."""
        if not self.ends_count:
            return stage_cuts(body, self.stages)
        first_of = blocks(body)
        each, over = divmod(len(first_of) + 1, self.stages)
        if over or not first_of:
            raise PlanningError(f"{len(first_of) + 1} layers, the ends among them, do not fill {self.stages} stages")
        return (0, *(first_of[stage * each - 1] for stage in range(1, self.stages)))
