"""Planners by hand: textbook plans and saved ones, on the path that every plan takes (passes/planner.py).

They choose a mesh, or submeshes, and rule out what the textbook does not do (passes/restrictions.py); the rest is
solved for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from passes import pipelines, restrictions, stages
from passes.cluster import Cluster
from passes.errors import PlanMismatchError, PlanningError, explain
from passes.intra_op import SolverOptions
from passes.ir import Graph
from passes.mesh_search import Tied, best, layouts, named
from passes.pipeline import PipelinePlan, load_plan
from passes.pipelines import pipelined
from passes.plan import Plan
from passes.remat import Kept, kept_of
from passes.repeats import stage_cuts
from passes.stages import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """The batch over all devices, everything else whole: one gradient reduction per parameter."""

    solver: SolverOptions = field(default_factory=SolverOptions)

    def plan(self, graph: Graph, cluster: Cluster, *, tied: Tied = (), donated: Sequence[bool] = ()) -> Plan:
        mesh = named(cluster, ("data", cluster.n_devices))
        return best("data parallel", graph, [mesh], tied, donated, self.solver, restrictions.data_parallel)


@dataclass(frozen=True, slots=True)
class Zero:
    """Data parallelism with optimizer state cut over the devices (`stage` 1 or 2) and parameters too (3).

    Reference: Rajbhandari et al., "ZeRO" (SC 2020). Stages 1 and 2 differ only in how long gradients live; here they
    are scattered as soon as they are summed, which is stage 2.
    """

    stage: int = 3
    solver: SolverOptions = field(default_factory=SolverOptions)

    def plan(self, graph: Graph, cluster: Cluster, *, tied: Tied = (), donated: Sequence[bool] = ()) -> Plan:
        restrict = restrictions.zero(self.stage)
        mesh = named(cluster, ("data", cluster.n_devices))
        name = f"zero-{self.stage}"
        return best(name, graph, [mesh], tied, donated, self.solver, restrict, refetch=self.stage == 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """The batch over `data` devices, every weight matrix over `tensor` devices; which dimension is cut is solved for.

    With `pipeline` submeshes, each is laid out so and has `interleave` stages in turn, through which `microbatches` run
    by `schedule`, or interleaved.

    Reference: Shoeybi et al., "Megatron-LM" (2019), section 3; Narayanan et al. (SC 2021), section 3.
    """

    data: int
    tensor: int
    pipeline: int = 1
    interleave: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    solver: SolverOptions = field(default_factory=SolverOptions)

    @property
    def pipelined(self) -> bool:
        """Whether there are several stages."""
        return self.pipeline > 1

    @property
    def stages(self) -> int:
        return self.pipeline * self.interleave

    def plan(
        self, graph: Graph, cluster: Cluster, *, tied: Tied = (), donated: Sequence[bool] = ()
    ) -> Plan | PipelinePlan:
        sizes = {"data": self.data, "tensor": self.tensor}
        restrictions.check_sizes(sizes | ({"pipeline": self.pipeline} if self.pipelined else {}), cluster)
        mesh = named(cluster, ("data", self.data), ("tensor", self.tensor))
        name = f"megatron {self.data}x{self.tensor}" + (f"x{self.pipeline}" if self.pipelined else "")
        if not self.pipelined:
            return best(name, graph, [mesh], tied, donated, self.solver, restrictions.megatron)
        firsts = stage_cuts(pipelines.body_of(graph), self.stages)
        schedule = "interleaved" if self.interleave > 1 else self.schedule

        def plan_stage(part: Part, stage: int) -> Plan:
            ties, given = stages.ties(part, graph, tied), stages.donations(part, graph, donated)
            return best(f"stage {stage}", part.graph, [mesh], ties, given, self.solver, restrictions.megatron)

        return pipelined(name, graph, cluster, tied, donated, firsts, schedule, plan_stage, self.interleave)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages one behind the other, each planned on a submesh of its own; microbatches run through them.

    `submeshes` are the devices of each stage, equal by default; `schedule` is a name of `autopar.SCHEDULES`. Stages are
    cut between the blocks of a model that repeats itself, else where little crosses, as even in work as that allows;
    with `layers` only between modules whose names match it (`"Block_*"`). With `interleave`, every submesh has so many
    stages in turn and the schedule is `interleaved`.
    """

    stages: int
    microbatches: int
    schedule: str = "1f1b"
    submeshes: tuple[int, ...] = ()
    interleave: int = 1
    layers: str = ""
    max_axes: int = 2
    solver: SolverOptions = field(default_factory=SolverOptions)

    pipelined = True

    def plan(self, graph: Graph, cluster: Cluster, *, tied: Tied = (), donated: Sequence[bool] = ()) -> PipelinePlan:
        sizes = pipelines.check_submeshes(self.stages, self.submeshes, cluster)
        firsts = stage_cuts(pipelines.body_of(graph), self.stages * self.interleave, self.layers)

        def plan_stage(part: Part, stage: int) -> Plan:
            meshes = layouts(cluster, sizes[stage % self.stages], self.max_axes)
            ties, given = stages.ties(part, graph, tied), stages.donations(part, graph, donated)
            return best(f"stage {stage}", part.graph, meshes, ties, given, self.solver)

        schedule = "interleaved" if self.interleave > 1 else self.schedule
        name = f"pipeline of {self.stages}"
        return pipelined(name, graph, cluster, tied, donated, firsts, schedule, plan_stage, self.interleave)


def GPipe(stages: int, microbatches: int) -> Pipeline:
    """The pipeline that runs all forwards, then all backwards (Huang et al., "GPipe", NeurIPS 2019)."""
    return Pipeline(stages=stages, microbatches=microbatches, schedule="gpipe")


@dataclass(frozen=True, slots=True)
class Manual:
    """A saved or edited plan (a path or a Plan), replayed without solving."""

    source: str | Path | Plan | PipelinePlan

    @property
    def microbatches(self) -> int:
        """How many microbatches the plan was made for."""
        return self._read().microbatches

    @property
    def remat(self) -> tuple[Kept, ...]:
        """What each layer keeps for the backward pass, empty for the step as it was written."""
        plan = self._read()
        return () if isinstance(plan, PipelinePlan) else kept_of(plan.remat)

    @property
    def pipelined(self) -> bool:
        """Whether it is the plan of a pipeline."""
        return isinstance(self._read(), PipelinePlan)

    def plan(
        self, graph: Graph, cluster: Cluster, *, tied: Tied = (), donated: Sequence[bool] = ()
    ) -> Plan | PipelinePlan:
        plan = self._read()
        if isinstance(plan, PipelinePlan):
            plan.check(graph, tied)
            size, shape = plan.n_devices, f"{len(plan.stages)} stages"
        else:
            plan.check(graph)
            size, shape = plan.mesh.size, str(plan.mesh)
        if size > cluster.n_devices:
            raise PlanMismatchError(
                f"the plan was made for {size} devices ({shape}), the cluster {cluster.name!r} has "
                f"{cluster.n_devices}. Plan again for this cluster, or run where the plan belongs"
            )
        return plan

    def _read(self) -> Plan | PipelinePlan:
        if not isinstance(cast(object, self.source), str | Path | Plan | PipelinePlan):
            rule = "a saved plan is a path, an autopar.Plan or an autopar.PipelinePlan"
            remedy = "pass what plan.save(path) wrote, or the plan itself"
            raise PlanningError(explain(f"Manual({self.source!r:.60})", rule, "", remedy))
        return load_plan(self.source) if isinstance(self.source, str | Path) else self.source
