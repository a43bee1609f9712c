"""Planners by hand: textbook plans and saved ones, on the path that every plan takes (passes/planners/auto.py).

They choose a mesh, or submeshes, and rule out what the textbook does not do (passes/intra_op/restrictions.py); the rest
is solved for.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from passes.cluster import Cluster
from passes.errors import PlanMismatchError, PlanningError, explain
from passes.intra_op import accounted, best, in_forward, layouts, named, restrictions
from passes.ir import Graph, StatePairs, TensorType
from passes.layers import stage_cuts
from passes.pipeline import body_of, check_submeshes, pipelined, recounted
from passes.plan import PipelinePlan, Plan, load_plan
from passes.solver import SolverOptions
from passes.text import nbytes
from passes.transforms import Kept, Part, kept_of, microbatch_stacks, stages


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """The batch over all devices, everything else whole: one gradient reduction per parameter."""

    solver: SolverOptions = field(default_factory=SolverOptions)

    def plan(
        self, graph: Graph, cluster: Cluster, *, state_pairs: StatePairs = (), donated: Sequence[bool] = ()
    ) -> Plan:
        mesh = named(cluster, ("data", cluster.n_devices))
        return best("data parallel", graph, [mesh], state_pairs, donated, self.solver, restrictions.data_parallel)


@dataclass(frozen=True, slots=True)
class Zero:
    """Data parallelism with optimizer state cut over the devices (`stage` 1 or 2) and parameters too (3).

    Where the devices do not divide what they should cut, as 1,120 do not divide 20,480, the mesh has two axes, of which
    each cuts what it divides; `UserWarning` names what stays whole even so.

    Reference: Rajbhandari et al., "ZeRO" (SC 2020). Stages 1 and 2 differ only in how long gradients live; here they
    are scattered as soon as they are summed, which is stage 2.
    """

    stage: int = 3
    solver: SolverOptions = field(default_factory=SolverOptions)

    def plan(
        self, graph: Graph, cluster: Cluster, *, state_pairs: StatePairs = (), donated: Sequence[bool] = ()
    ) -> Plan:
        restrict = restrictions.zero(self.stage)
        state = _sharded(graph, state_pairs, self.stage)
        sizes = zero_sizes([graph.types[v] for v in state], cluster.n_devices)
        mesh = named(cluster, *zip(("data",) if len(sizes) == 1 else ("replica", "shard"), sizes, strict=True))
        plan = best(
            f"zero-{self.stage}", graph, [mesh], state_pairs, donated, self.solver, restrict, refetch=self.stage == 3
        )
        _warn_of_wholes(plan, graph, state)
        return plan


WORTHWHILE = 0.01
"""The share of the state's bytes on a device that a second axis must save, if there is to be one."""


LARGE = 0.1
"""The share of the state that may stay whole without a word."""


def _sharded(graph: Graph, state_pairs: StatePairs, stage: int) -> list[int]:
    """The inputs that ZeRO cuts: optimizer state, and parameters in stage 3."""
    returned = sorted({graph.inputs[i] for _, i in state_pairs} - microbatch_stacks(graph))
    return [v for v in returned if stage == 3 or not in_forward(graph, v)]


def zero_sizes(state: Sequence[TensorType], n_devices: int) -> tuple[int, ...]:
    """The devices along each axis of ZeRO's mesh: one axis where all devices together divide the `state`.

    Otherwise two, each of which may cut a dimension of its own: (the rest, those that cut most). What neither divides
    stays whole, and so a value is cut over some of the devices where it cannot be over all.

    Reference: hybrid sharding in Zhao et al., "PyTorch FSDP" (VLDB 2023), section 3.2.2.
    """
    types = Counter(state)

    def held(*sizes: int) -> float:
        """Bytes of the state on one device."""
        return sum(count * type.nbytes / most_parts(type.shape, sizes) for type, count in types.items())

    pairs = [(n_devices // inner, inner) for inner in range(2, n_devices) if n_devices % inner == 0]
    best = min(pairs, key=lambda pair: (held(*pair), held(pair[1])), default=(1, n_devices))
    return best if held(n_devices) > (1 + WORTHWHILE) * held(*best) else (n_devices,)


def most_parts(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """The most pieces that axes of these sizes can cut an array into, each axis one dimension or none."""
    if not sizes:
        return 1
    first, rest = sizes[0], sizes[1:]
    best = most_parts(shape, rest)
    for dim, size in enumerate(shape):
        if size and size % first == 0:
            left = (*shape[:dim], size // first, *shape[dim + 1 :])
            best = max(best, first * most_parts(left, rest))
    return best


def _warn_of_wholes(plan: Plan, graph: Graph, state: Sequence[int]) -> None:
    """Warns where a good part of what ZeRO should cut is whole on every device, as no axis divides it."""
    at = dict(zip(graph.inputs, plan.inputs, strict=True))
    whole = [v for v in state if at[v].is_replicated and plan.mesh.axes]
    held, total = (sum(graph.types[v].nbytes for v in values) for values in (whole, state))
    if held > LARGE * total:
        largest = max(whole, key=lambda v: graph.types[v].nbytes)
        name = dict(zip(graph.inputs, graph.input_names, strict=False)).get(largest, f"input {largest}")
        warnings.warn(
            explain(
                f"{plan.solution.planner} on {plan.mesh.size} devices",
                f"{nbytes(held)} of {nbytes(total)} of state stay whole on every device: no axis of the mesh "
                f"{plan.mesh} divides a dimension of {name} {graph.types[largest]}",
                "",
                "use a number of devices that divides it, pad it, or planner=Auto()",
            ),
            stacklevel=2,
        )


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
        self, graph: Graph, cluster: Cluster, *, state_pairs: StatePairs = (), donated: Sequence[bool] = ()
    ) -> Plan | PipelinePlan:
        sizes = {"data": self.data, "tensor": self.tensor}
        restrictions.check_sizes(sizes | ({"pipeline": self.pipeline} if self.pipelined else {}), cluster)
        mesh = named(cluster, ("data", self.data), ("tensor", self.tensor))
        name = f"megatron {self.data}x{self.tensor}" + (f"x{self.pipeline}" if self.pipelined else "")
        if not self.pipelined:
            return best(name, graph, [mesh], state_pairs, donated, self.solver, restrictions.megatron)
        firsts = stage_cuts(body_of(graph), self.stages)
        schedule = "interleaved" if self.interleave > 1 else self.schedule

        def plan_stage(part: Part, stage: int) -> Plan:
            pairs, given = stages.state_pairs_of(part, graph, state_pairs), stages.donations(part, graph, donated)
            return best(f"stage {stage}", part.graph, [mesh], pairs, given, self.solver, restrictions.megatron)

        return pipelined(name, graph, cluster, state_pairs, donated, firsts, schedule, plan_stage, self.interleave)


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

    def plan(
        self, graph: Graph, cluster: Cluster, *, state_pairs: StatePairs = (), donated: Sequence[bool] = ()
    ) -> PipelinePlan:
        sizes = check_submeshes(self.stages, self.submeshes, cluster)
        firsts = stage_cuts(body_of(graph), self.stages * self.interleave, self.layers)

        def plan_stage(part: Part, stage: int) -> Plan:
            meshes = layouts(cluster, sizes[stage % self.stages], self.max_axes)
            pairs, given = stages.state_pairs_of(part, graph, state_pairs), stages.donations(part, graph, donated)
            return best(f"stage {stage}", part.graph, meshes, pairs, given, self.solver)

        schedule = "interleaved" if self.interleave > 1 else self.schedule
        name = f"pipeline of {self.stages}"
        return pipelined(name, graph, cluster, state_pairs, donated, firsts, schedule, plan_stage, self.interleave)


def GPipe(stages: int, microbatches: int) -> Pipeline:
    """The pipeline that runs all forwards, then all backwards (Huang et al., "GPipe", NeurIPS 2019)."""
    return Pipeline(stages=stages, microbatches=microbatches, schedule="gpipe")


@dataclass(frozen=True, slots=True)
class Manual:
    """A saved or edited plan (a path or a Plan), replayed without solving; what it sends and holds is counted anew."""

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
        self, graph: Graph, cluster: Cluster, *, state_pairs: StatePairs = (), donated: Sequence[bool] = ()
    ) -> Plan | PipelinePlan:
        plan = self._read()
        if isinstance(plan, PipelinePlan):
            plan.check(graph, state_pairs)
            plan = recounted(plan, graph, state_pairs, donated)
            size, shape = plan.n_devices, f"{len(plan.stages)} stages"
        else:
            plan.check(graph)
            plan = accounted(plan, graph, state_pairs, donated)
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
