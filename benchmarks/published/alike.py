"""Megatron's planner, for deep pipelines: stages that are equal are planned once, as in a search over stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.cluster import Cluster
from passes.intra_op import best, named, restrictions
from passes.ir import Graph, StatePairs
from passes.layers import stage_cuts
from passes.pipeline import body_of, pipelined
from passes.pipeline.assemble import restated
from passes.plan import PipelinePlan, Plan
from passes.planners import Megatron
from passes.transforms import Part, stages


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepMegatron(Megatron):
    """The plan that `Megatron` makes, in less time."""

    def plan(
        self, graph: Graph, cluster: Cluster, *, state_pairs: StatePairs = (), donated: Sequence[bool] = ()
    ) -> Plan | PipelinePlan:
        if not self.pipelined:
            return Megatron.plan(self, graph, cluster, state_pairs=state_pairs, donated=donated)
        restrictions.check_sizes({"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}, cluster)
        mesh = named(cluster, ("data", self.data), ("tensor", self.tensor))
        known: dict[object, tuple[Graph, Plan]] = {}

        def plan_stage(part: Part, stage: int) -> Plan:
            pairs, given = stages.state_pairs_of(part, graph, state_pairs), stages.donations(part, graph, donated)
            key, name = (part.graph.fingerprint, pairs, given), f"stage {stage}"
            if key not in known:
                plan = best(name, part.graph, [mesh], pairs, given, self.solver, restrictions.megatron)
                known[key] = part.graph, plan
                return plan
            planned, plan = known[key]
            plan = restated(plan, planned, part.graph, pairs, given)
            return replace(plan, solution=replace(plan.solution, planner=name))

        firsts = stage_cuts(body_of(graph), self.stages)
        schedule = "interleaved" if self.interleave > 1 else self.schedule
        name = f"megatron {self.data}x{self.tensor}x{self.pipeline}"
        return pipelined(name, graph, cluster, state_pairs, donated, firsts, schedule, plan_stage, self.interleave)
