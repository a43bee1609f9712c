"""Megatron's planner for deep pipelines, which plans equal stages once, as a search over stages does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

from passes.cluster import Cluster
from passes.errors import PlanningError
from passes.intra_op import MeshProblems, cheapest_plan, named, restrictions
from passes.intra_op.assembly import Assembly
from passes.intra_op.roles import Value
from passes.intra_op.strategy_filter import StrategyFilter, restricted
from passes.ir import Graph
from passes.layers import stage_cuts
from passes.layers.repeats import stretches
from passes.pipeline import PipelineOptions, body_of, pipelined
from passes.pipeline.assemble import restated
from passes.plan import Plan
from passes.planners import Megatron, Planned, PlanOptions
from passes.planners.checks import check_devices
from passes.sharding import ShardingSpec
from passes.step import Step, Variant, seen_by


def _sequence(assembly: Assembly, axis: str = "tensor") -> Assembly:
    """The assembly in which what a loop saves for its backward pass is cut along an axis wherever it can be.

    Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2:
    norms, dropout and residuals lie cut along the sequence over the devices that share the matrices.
    """
    if axis not in assembly.mesh.axes:
        return assembly
    return restricted(assembly, _StackedCut(axis))


@dataclass(frozen=True, slots=True)
class _StackedCut(StrategyFilter):
    """Values that loops stack, cut over an axis."""

    axis: str

    def keeps_stacked(self, value: Value, spec: ShardingSpec) -> bool:
        return any(self.axis in axes for axes in spec.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepMegatron(Megatron):
    """A planner that makes the plan of `Megatron`, in less time, of a step that is split into microbatches already.

    With `ends_count` the embedding and the head count as a layer each, and stages have equally many. `layers` [stages]
    gives each stage's number, where it is not empty. With `sequence`, what layers save is cut along the sequence over
    the tensor devices.
    """

    ends_count: bool = False
    layers: tuple[int, ...] = ()
    sequence: bool = False

    def restriction(self, assembly: Assembly, rows: Mapping[int, int] = MappingProxyType({})) -> Assembly:
        """The assembly of a stage with Megatron's placements alone; `rows` are batch dimensions by input."""
        placed = Megatron.restriction(self, assembly, rows)
        return _sequence(placed) if self.sequence else placed

    def plan(self, step: Step, cluster: Cluster, options: PlanOptions) -> Planned:
        if self.pipeline == 1 and not self.sequence:
            return Megatron.plan(self, step, cluster, options)
        step = seen_by(step, cluster)
        check_devices(cluster, data=self.data, tensor=self.tensor, pipeline=self.pipeline)
        mesh = named(cluster, ("data", self.data), ("tensor", self.tensor))
        if self.pipeline == 1:
            step = step.variant(Variant(microbatches=self.microbatches, stages=0))
            problems = MeshProblems(step=step, restrict=self._whole(step))
            return Planned.of(cheapest_plan(self.name, problems, [mesh], self.solver), step)
        known: dict[object, tuple[Step, Plan]] = {}

        def plan_stage(part: Step, stage: int) -> Plan:
            key, name = (part.graph.fingerprint, part.state_pairs, part.donated), f"stage {stage}"
            if key not in known:
                plan = cheapest_plan(name, MeshProblems(step=part, restrict=self.restriction), [mesh], self.solver)
                known[key] = part, plan
                return plan
            planned, plan = known[key]
            plan = restated(plan, planned.graph, part)
            return replace(plan, solution=replace(plan.solution, planner=name))

        firsts = self._firsts(body_of(step.graph))
        schedule = "interleaved" if self.interleave > 1 else self.schedule
        of_pipeline = PipelineOptions(planner=self.name, cluster=cluster, schedule=schedule, chunks=self.interleave)
        return Planned.of(pipelined(step, firsts, plan_stage, of_pipeline), step)

    def _whole(self, step: Step) -> Callable[[Assembly], Assembly]:
        """A function that restricts the assembly of a whole step, whose batch is known, to Megatron's placements."""
        is_cut = self.zero > 0
        return lambda assembly: _sequence(restrictions.megatron(assembly, batch=step.batch, is_state_cut=is_cut))

    def _firsts(self, body: Graph) -> tuple[int, ...]:
        """The first body node of each stage. Raises PlanningError for layers that stages do not share evenly."""
        if not self.ends_count and not self.layers:
            return stage_cuts(body, self.stages)
        first_of = max(stretches(body), key=len, default=())
        if self.layers:
            begins = list(accumulate(self.layers[:-1]))
            if max(begins, default=0) >= len(first_of):
                raise PlanningError(f"{sum(self.layers)} layers are asked for, and {len(first_of)} are seen")
            return (0, *(first_of[layer] for layer in begins))
        each, over = divmod(len(first_of) + 1, self.stages)
        if over or not first_of:
            raise PlanningError(f"{len(first_of) + 1} layers, the ends among them, do not fill {self.stages} stages")
        return (0, *(first_of[stage * each - 1] for stage in range(1, self.stages)))
