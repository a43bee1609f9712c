"""Hand-made planners, such as data parallelism, ZeRO and Megatron, and saved plans.

They choose a mesh, or submeshes, and rule out strategies that such a plan does not have
(passes/intra_op/restrictions.py); the rest is solved for, on the path of every plan (passes/planners/auto.py).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from passes.cluster import Cluster, Mesh
from passes.errors import PlanMismatchError, PlanningError, explain
from passes.intra_op import Assembly, MeshProblems, cheapest_plan, layouts, named, pins, restrictions
from passes.ir import TensorType
from passes.layers import stage_cuts
from passes.pipeline import PipelineOptions, body_of, check_submeshes, pipelined, recounted, weigh_on
from passes.plan import STAGE, AnyPlan, Plan, load_plan
from passes.planners.checks import (
    check_count,
    check_counts,
    check_devices,
    check_layers,
    check_optimizer_stage,
    check_optional_counts,
    check_solver,
    check_zero_stage,
    checked_schedule,
    checked_submeshes,
    listed,
    set_integers,
)
from passes.planners.planner import PLAIN, Planned, PlanOptions, takes_graphs
from passes.planners.wholes import warn_of_whole_state, warn_of_whole_work
from passes.solver import SolverOptions
from passes.step import Step, Variant
from passes.text import plain_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """The planner of data parallelism: the batch is cut over all devices, and everything else is whole."""

    solver: SolverOptions = field(default_factory=SolverOptions)

    def __post_init__(self) -> None:
        check_solver("DataParallel", self.solver)

    @takes_graphs
    def plan(self, step: Step, cluster: Cluster, options: PlanOptions = PLAIN) -> Planned:
        mesh = named(cluster, ("data", cluster.n_devices))
        restrict = partial(restrictions.data_parallel, batch=step.batch, rows=step.rows)
        plan = cheapest_plan("data parallel", MeshProblems(step=step, restrict=restrict), [mesh], self.solver)
        warn_of_whole_work(plan, step)
        return Planned.of(plan, step)


@dataclass(frozen=True, slots=True)
class Zero:
    """The planner of ZeRO: data parallelism with optimizer state (`stage` 1 or 2) and also parameters (3) cut over the
    devices.

    Parameters that are not updated are among them. Where the devices do not divide an array, as 1,120 do not divide
    20,480, the mesh has two axes, each of which cuts what it divides; `UserWarning` names what stays whole even so.

    Reference: Rajbhandari et al., "ZeRO" (SC 2020). Stages 1 and 2 differ only in how long gradients live; here they
    are scattered as soon as they are summed, which is stage 2.
    """

    stage: int = 3
    solver: SolverOptions = field(default_factory=SolverOptions)

    def __post_init__(self) -> None:
        set_integers(self, "stage")
        check_zero_stage(self.stage)
        check_solver("Zero", self.solver)

    @takes_graphs
    def plan(self, step: Step, cluster: Cluster, options: PlanOptions = PLAIN) -> Planned:
        restrict = partial(restrictions.zero, stage=self.stage, batch=step.batch, rows=step.rows)
        state = restrictions.sharded_by_zero(self.stage, step.graph, step.state_pairs, step.batch)
        sizes = zero_sizes([step.graph.types[v] for v in state], cluster.n_devices)
        mesh = named(cluster, *zip(("data",) if len(sizes) == 1 else ("replica", "shard"), sizes, strict=True))
        problems, regather = MeshProblems(step=step, restrict=restrict), self.stage == 3
        plan = cheapest_plan(f"zero-{self.stage}", problems, [mesh], self.solver, regather=regather)
        warn_of_whole_state(plan, step.graph, state)
        warn_of_whole_work(plan, step)
        return Planned.of(plan, step)


WORTHWHILE = 0.01
"""The share of the state's bytes on a device that a second axis must save for there to be one."""


def zero_sizes(state: Sequence[TensorType], n_devices: int) -> tuple[int, ...]:
    """The devices along each axis of ZeRO's mesh: one axis where all devices together divide the `state`.

    Otherwise there are two axes, each of which may cut a dimension of its own: (the rest, the size that cuts most). An
    array that neither divides stays whole, and some are cut over one axis alone.

    Reference: hybrid sharding in Zhao et al., "PyTorch FSDP" (VLDB 2023), section 3.2.2.
    """
    types = Counter(state)

    def state_nbytes(*sizes: int) -> float:
        """Bytes of the state on one device."""
        return sum(count * type.nbytes / most_parts(type.shape, sizes) for type, count in types.items())

    pairs = [(n_devices // inner, inner) for inner in range(2, n_devices) if n_devices % inner == 0]
    best = min(pairs, key=lambda pair: (state_nbytes(*pair), state_nbytes(pair[1])), default=(1, n_devices))
    return best if state_nbytes(n_devices) > (1 + WORTHWHILE) * state_nbytes(*best) else (n_devices,)


def most_parts(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """The most pieces that axes of these sizes can cut an array into, each cutting one dimension or none."""
    if not sizes:
        return 1
    first, rest = sizes[0], sizes[1:]
    best = most_parts(shape, rest)
    for dim, size in enumerate(shape):
        if size and size % first == 0:
            smaller = (*shape[:dim], size // first, *shape[dim + 1 :])
            best = max(best, first * most_parts(smaller, rest))
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """The planner of Megatron: the batch over `data` devices, every weight matrix over `tensor` devices.

    Which dimension of a matrix is cut is solved for. With `pipeline` submeshes, each is laid out so and has
    `interleave` stages in turn, through which `microbatches` run by `schedule`, or interleaved. `microbatches` are
    those of `parallelize` by default, else one. With `zero=1`, optimizer state is cut over the `data` devices as well:
    gradients are scattered once summed, each device updates its part, and parameters are gathered for the next step.

    Reference: Shoeybi et al., "Megatron-LM" (2019), section 3; Narayanan et al. (SC 2021), section 3; for `zero`,
    Rajbhandari et al., "ZeRO" (SC 2020), section 5.1.
    """

    data: int
    tensor: int
    pipeline: int = 1
    interleave: int = 1
    microbatches: int | None = None
    schedule: str = "1f1b"
    zero: int = 0
    solver: SolverOptions = field(default_factory=SolverOptions)

    def __post_init__(self) -> None:
        check_counts(self, "data", "tensor", "pipeline", "interleave")
        set_integers(self, "zero")
        check_optimizer_stage(self.zero)
        checked_schedule("Megatron", self.schedule, self.interleave)
        if self.interleave > 1 and self.pipeline == 1:
            rule = "interleaves the stages of a pipeline, and there is none"
            raise PlanningError(explain(f"Megatron(interleave={self.interleave})", rule, "", "give pipeline= as well"))
        check_optional_counts(self, "microbatches")
        check_solver("Megatron", self.solver)

    @property
    def stages(self) -> int:
        return self.pipeline * self.interleave

    @property
    def name(self) -> str:
        """The planner as text: `megatron 2x4x2, interleave 2, zero-1`."""
        sizes = "x".join(map(str, (self.data, self.tensor, self.pipeline)[: 3 if self.pipeline > 1 else 2]))
        in_turn = f", interleave {self.interleave}" if self.interleave > 1 else ""
        return f"megatron {sizes}{in_turn}" + (f", zero-{self.zero}" if self.zero else "")

    def restriction(self, assembly: Assembly, rows: Mapping[int, int] = MappingProxyType({})) -> Assembly:
        """The assembly of a stage with Megatron's strategies alone; inputs have the batch along the dimensions of
        `rows`.
        """
        return restrictions.megatron(assembly, is_state_cut=self.zero > 0, rows=rows)

    @takes_graphs
    def plan(self, step: Step, cluster: Cluster, options: PlanOptions = PLAIN) -> Planned:
        is_staged = self.pipeline > 1
        pipeline = {"pipeline": self.pipeline} if is_staged else {}
        check_devices(cluster, data=self.data, tensor=self.tensor, **pipeline)
        mesh = named(cluster, ("data", self.data), ("tensor", self.tensor))
        step = step.variant(Variant(microbatches=self.microbatches, stages=self.stages if is_staged else 0))
        if not is_staged:
            restrict = partial(restrictions.megatron, batch=step.batch, is_state_cut=self.zero > 0)
            problems = MeshProblems(step=step, restrict=restrict)
            return Planned.of(cheapest_plan(self.name, problems, [mesh], self.solver), step)
        firsts = stage_cuts(body_of(step.graph), self.stages, weigh=weigh_on(cluster))
        schedule = checked_schedule("Megatron", self.schedule, self.interleave)

        def plan_stage(part: Step, stage: int) -> Plan:
            restrict = partial(self.restriction, rows=part.rows)
            return cheapest_plan(f"stage {stage}", MeshProblems(step=part, restrict=restrict), [mesh], self.solver)

        of_pipeline = PipelineOptions(planner=self.name, cluster=cluster, schedule=schedule, chunks=self.interleave)
        return Planned.of(pipelined(step, firsts, plan_stage, of_pipeline), step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The planner of a pipeline: stages in a row, each planned on a submesh of its own, through which microbatches run.

    `submeshes` are the numbers of devices of the stages, equal by default; `schedule` is a name of `autopar.SCHEDULES`.
    Stages are cut between the blocks of a model that repeats itself, else where few bytes cross, as even in time as
    that allows; with `layers` only between modules whose names match it (`"Block_*"`). With `interleave`, every submesh
    has that many stages in turn, and the schedule is `interleaved` or another one with turns.

    `meshes` lay the submeshes out, such as `({"data": 2}, {"data": 1, "model": 2}, ...)`; None is searched. `pins` and
    `forbid` are as in `Auto`. `options` are those of single submeshes, and go before the ones of all: `({"forbid":
    {"all_gather"}}, {"pins": {"*/kernel": "[-, x]"}, "max_axes": 1}, None)`.
    """

    stages: int
    microbatches: int
    schedule: str = "1f1b"
    submeshes: tuple[int, ...] = ()
    interleave: int = 1
    layers: str = ""
    max_axes: int = 2
    meshes: Sequence[Mapping[str, int] | None] = ()
    pins: pins.Pins | Mapping[str, object] | None = ()
    forbid: Iterable[str] = ()
    options: Sequence[Mapping[str, Any] | None] = ()
    solver: SolverOptions = field(default_factory=SolverOptions)

    def __post_init__(self) -> None:
        check_counts(self, "stages", "microbatches", "interleave", "max_axes")
        checked_schedule("Pipeline", self.schedule, self.interleave)
        check_layers("Pipeline", self.layers)
        check_solver("Pipeline", self.solver)
        object.__setattr__(self, "submeshes", checked_submeshes("Pipeline", self.submeshes))
        object.__setattr__(self, "meshes", tuple(map(_checked_mesh, listed("Pipeline", "meshes", self.meshes))))
        object.__setattr__(self, "pins", pins.checked_pins(self.pins))
        object.__setattr__(self, "forbid", pins.checked_kinds(None, self.forbid))
        object.__setattr__(self, "options", tuple(map(_checked_options, listed("Pipeline", "options", self.options))))
        for name, each in (("meshes", self.meshes), ("options", self.options)):
            if each and len(each) != self.stages:
                rule = f"it names {len(each)} {name}, and there are {self.stages} submeshes"
                raise PlanningError(explain(f"Pipeline({name}=)", rule, "", "name one for each, None for any"))

    def _of(self, submesh: int, name: str) -> Any:
        """An option of a submesh: its own, else the one of all submeshes."""
        chosen = dict(cast("Options", self.options[submesh])) if self.options else {}
        return chosen.get(name, getattr(self, name))

    def _laid_out(self, cluster: Cluster, submesh: int, size: int) -> list[Mesh]:
        """The meshes that a submesh of that many devices may be."""
        axes = self.meshes[submesh] if self.meshes else ()
        searched = [] if axes else layouts(cluster, size, self._of(submesh, "max_axes"))
        meshes = searched or [pins.mesh_named(cluster, cast("Any", axes), size)]
        return [pins.without(mesh, self._of(submesh, "forbid")) for mesh in meshes]

    @takes_graphs
    def plan(self, step: Step, cluster: Cluster, options: PlanOptions = PLAIN) -> Planned:
        sizes = check_submeshes(self.stages, self.submeshes, cluster)
        by_name = [pins.ByName(self._of(submesh, "pins")) for submesh in range(self.stages)]
        for pinned in by_name:
            pinned.check(step.graph)
        step = step.variant(Variant(microbatches=self.microbatches, stages=self.stages * self.interleave))
        n_stages = self.stages * self.interleave
        firsts = stage_cuts(body_of(step.graph), n_stages, self.layers, weigh_on(cluster))

        def plan_stage(part: Step, stage: int) -> Plan:
            submesh = stage % self.stages
            meshes = self._laid_out(cluster, submesh, sizes[submesh])
            restrict = by_name[submesh] if by_name[submesh].pins else None
            return cheapest_plan(f"stage {stage}", MeshProblems(step=part, restrict=restrict), meshes, self.solver)

        schedule = checked_schedule("Pipeline", self.schedule, self.interleave)
        name = f"pipeline of {self.stages}" + (f", interleave {self.interleave}" if self.interleave > 1 else "")
        of_pipeline = PipelineOptions(planner=name, cluster=cluster, schedule=schedule, chunks=self.interleave)
        return Planned.of(pipelined(step, firsts, plan_stage, of_pipeline), step)


def _checked_mesh(mesh: object) -> tuple[tuple[str, int], ...]:
    """The axes and sizes of a submesh. Raises PlanningError for anything else."""
    axes = pins.checked_mesh(mesh)
    if any(name == STAGE for name, _ in axes):
        rule = f"{STAGE!r} is the axis along which the stages themselves lie"
        raise PlanningError(explain("Pipeline(meshes=)", rule, "", "choose another name for the axis"))
    return axes


def _checked_axes(axes: int) -> int:
    count = cast("int", plain_integer(axes))
    check_count("Pipeline", "max_axes", count)
    return count


Options = tuple[tuple[str, Any], ...]
"""Options of a submesh by name."""

_CHECKED: Mapping[str, Callable[[Any], object]] = {
    "forbid": partial(pins.checked_kinds, None),
    "pins": pins.checked_pins,
    "max_axes": _checked_axes,
}
"""The options of a single submesh, each with the function that reads it."""


def _checked_options(options: object) -> Options:
    """The options of a submesh that a user wrote; empty for None. Raises PlanningError for unknown ones."""
    if options is None or isinstance(options, tuple):
        return cast("Options", options or ())
    written = dict(cast("Any", options)) if isinstance(options, Mapping) else {str(options): None}
    unknown = [repr(name) for name in written if name not in _CHECKED]
    if unknown:
        rule = f"{', '.join(unknown)} is no option of a submesh; these are {', '.join(_CHECKED)}"
        remedy = 'write, say, options=({"forbid": {"all_gather"}}, None)'
        raise PlanningError(explain("Pipeline(options=)", rule, "", remedy))
    return tuple((name, _CHECKED[name](value)) for name, value in written.items())


@dataclass(frozen=True, slots=True)
class GPipe:
    """The planner of a pipeline that runs all forwards, then all backwards; otherwise as `Pipeline`.

    Reference: Huang et al., "GPipe" (NeurIPS 2019).
    """

    stages: int
    microbatches: int
    submeshes: tuple[int, ...] = ()
    layers: str = ""
    max_axes: int = 2
    solver: SolverOptions = field(default_factory=SolverOptions)

    def __post_init__(self) -> None:
        check_counts(self, "stages", "microbatches", "max_axes")
        check_layers("GPipe", self.layers)
        check_solver("GPipe", self.solver)
        object.__setattr__(self, "submeshes", checked_submeshes("GPipe", self.submeshes))

    @takes_graphs
    def plan(self, step: Step, cluster: Cluster, options: PlanOptions = PLAIN) -> Planned:
        return Pipeline(
            stages=self.stages,
            microbatches=self.microbatches,
            schedule="gpipe",
            submeshes=self.submeshes,
            layers=self.layers,
            max_axes=self.max_axes,
            solver=self.solver,
        ).plan(step, cluster, options)


@dataclass(frozen=True, slots=True)
class Manual:
    """The planner that replays a saved or edited plan (a path or a Plan) without solving; collectives and bytes are
    counted anew.
    """

    source: str | Path | AnyPlan

    @takes_graphs
    def plan(self, step: Step, cluster: Cluster, options: PlanOptions = PLAIN) -> Planned:
        saved = load_plan(self.source)
        step = saved.step_of(step)
        saved.check(step.graph, step.state_pairs)
        plan = recounted(saved, step)
        _check_devices(plan, cluster)
        return Planned.of(plan, step)

    def on(self, cluster: Cluster) -> Manual:
        """The same plan on the first devices of another cluster, with seconds and bytes counted for these.

        Raises PlanningError where there is no plan, or where it needs more devices than there are.
        """
        plan = load_plan(self.source)
        _check_devices(plan, cluster)
        return Manual(plan.on(cluster))


def _check_devices(plan: AnyPlan, cluster: Cluster) -> None:
    """Raises PlanMismatchError for a cluster of fewer devices than the plan has; warns where some are idle."""
    if plan.n_devices > cluster.n_devices:
        raise PlanMismatchError(
            f"the plan was made for {plan.n_devices} devices ({plan.shape}), the cluster {cluster.name!r} has "
            f"{cluster.n_devices}. Plan again for this cluster, or run where the plan belongs"
        )
    if max(plan.n_devices, plan.cluster.n_devices) < cluster.n_devices:
        saved = f"the plan was made for {plan.cluster.n_devices} devices ({plan.shape})"
        rule = f"{cluster.n_devices - plan.n_devices} of {cluster.n_devices} devices of {cluster.name!r} stand idle"
        warnings.warn(explain(saved, rule, "", "plan again for all of them"), stacklevel=3)
