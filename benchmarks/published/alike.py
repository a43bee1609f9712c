"""Megatron's planner, for deep pipelines: stages that are equal are planned once, as in a search over stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes.cluster import Cluster
from passes.intra_op import best, named, restrictions
from passes.layers import stage_cuts
from passes.pipeline import body_of, pipelined
from passes.pipeline.assemble import restated
from passes.plan import Plan
from passes.planners import Megatron, Planned, PlanOptions
from passes.step import Step, seen_by


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepMegatron(Megatron):
    """The plan that `Megatron` makes of a step that is in its variant already, in less time."""

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
                plan = best(name, part.graph, [mesh], pairs, given, self.solver, restrictions.megatron)
                known[key] = part, plan
                return plan
            planned, plan = known[key]
            plan = restated(plan, planned.graph, part.graph, part.state_pairs, part.donated)
            return replace(plan, solution=replace(plan.solution, planner=name))

        firsts = stage_cuts(body_of(step.graph), self.stages)
        schedule = "interleaved" if self.interleave > 1 else self.schedule
        name = f"megatron {self.data}x{self.tensor}x{self.pipeline}"
        return Planned.of(pipelined(name, step, cluster, firsts, schedule, plan_stage, self.interleave), step)
