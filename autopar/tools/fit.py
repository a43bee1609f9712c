"""Hand-made plans beside the searched one, and whether each fits in the memory of a cluster that need not be present.

No device is touched. `autopar.tools.largest` looks for larger batches and models that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import jax

from autopar.api import ParallelFunction, parallelize
from autopar.frontend import modules, structs_of
from autopar.rewrite import TracedStep
from passes.cluster import Cluster, HostGroup
from passes.errors import OverBudgetError, PlanningError
from passes.intra_op import MeshProblems, cheapest_plan, named
from passes.plan import AnyPlan, Plan
from passes.planners import Auto, DataParallel, Megatron, Planner, PlanOptions, Zero
from passes.step import Step
from passes.transforms import in_turn

TENSOR = (2, 4, 8)
"""The degrees of tensor parallelism that are tried for Megatron."""

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A step, plain or parallel, and its arguments: arrays or their shapes."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self:
        """An example from its parts."""
        return cls(step=step, args=args, kwargs=kwargs)

    @property
    def function(self) -> ParallelFunction:
        """The step as one that plans itself."""
        return self.step if isinstance(self.step, ParallelFunction) else parallelize(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The resources of plans: a cluster, the bytes that a device may need (None: its own), and seconds (None: no
    limit).
    """

    cluster: Cluster
    memory_limit: int | None = None
    seconds: float | None = None

    @property
    def auto(self) -> Auto:
        """The searching planner with this limit."""
        return Auto(memory_limit=self.memory_limit, seconds=self.seconds)

    @property
    def limit_nbytes(self) -> float:
        """Bytes that a plan may be predicted to need on one device."""
        return self.auto.limit(self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The outcome of one planner: its plan, or that of least memory where none fits; else the reason why
    there is none.
    """

    name: str
    limit_nbytes: float
    plan: Plan | None = None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.over_nbytes <= 0

    @property
    def over_nbytes(self) -> float:
        """Bytes of a device above the limit; negative where there is room."""
        return self.plan.peak_nbytes - self.limit_nbytes if self.plan else float("inf")

    def to_json(self) -> dict[str, object]:
        """The row as JSON data; of the plan, what it costs and chose."""
        fields: dict[str, object] = {"plan": self.name, "fits": self.fits}
        if self.refusal:
            fields["refusal"] = self.refusal
        if (plan := self.plan) is None:
            return fields
        return fields | {
            "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
            "microbatches": plan.microbatches,
            "remat": list(plan.remat),
            "offloaded": [plan.input_names[i] for i in plan.offloaded],
            "step_seconds": plan.step_seconds,
            "peak_nbytes": plan.peak_nbytes,
            "over_nbytes": max(0, int(self.over_nbytes)),
            "nbytes": dict(plan.nbytes),
            "where": plan.memory.where if plan.memory else "",
        }


def planned_step(plan: AnyPlan, example: Example) -> Step:
    """The step that a plan was made for. Raises PlanMismatchError where the example is of another one."""
    step = plan.step_of(traced_step(example, cluster=plan.cluster))
    plan.check(step.graph, step.state_pairs)
    return step


def traced_step(
    example: Example, rows: Mapping[int, int] | None = None, *, cluster: Cluster | None = None
) -> TracedStep:
    """An example as planners for a cluster take it, with the leading dimensions of the flat arguments at `rows` as they
    say.
    """
    example = with_rows(example, rows or {})
    function = example.function.replan(cluster=cluster)  # which is gone with the step
    return function.step(*example.args, **example.kwargs)


def with_rows(example: Example, rows: Mapping[int, int]) -> Example:
    """An example with the leading dimensions of the flat arguments at `rows` as they say."""
    if not rows:
        return example
    signature = example.function.signature
    dynamic = modules.without_leaves(signature.split(example.args, dict(example.kwargs))[0])
    structs = structs_of(dynamic, signature, len(example.args))
    leaves, tree = jax.tree.flatten(dynamic)
    for position, extent in rows.items():
        leaf = structs[position]
        leaves[position] = jax.ShapeDtypeStruct((extent, *leaf.shape[1:]), leaf.dtype, weak_type=leaf.weak_type)
    resized = modules.with_leaves(jax.tree.unflatten(tree, leaves))
    args, kwargs = signature.merge(resized, example.args, dict(example.kwargs))
    return replace(example, args=tuple(args), kwargs=kwargs)


def batch_of(step: TracedStep) -> tuple[int, ...]:
    """The flat arguments that make up the batch. Raises PlanningError where none does."""
    written = step.written
    named, pairs = written.named, written.state_pairs
    return in_turn(written.graph, 1, state_pairs=pairs, named=named, coupling="independent")[0].stacked


def quiet(what: str) -> None:
    """The callback that announces nothing."""


def plans(step: TracedStep, room: Room, announce: Announce = quiet) -> Iterator[Row]:
    """A row for each planner, from the plainest; `announce` is told what is planned next."""
    for name in PLANNERS:
        announce(f"planning {name}")
        yield row(name, step, room, announce)


def row(name: str, step: TracedStep, room: Room, announce: Announce = quiet) -> Row:
    """The outcome of one planner for a step."""
    try:
        return Row(name=name, limit_nbytes=room.limit_nbytes, plan=PLANNERS[name](step, room, announce))
    except OverBudgetError as error:
        plan = cast("Plan | None", error.least_memory_plan)
        return Row(name=name, limit_nbytes=room.limit_nbytes, plan=plan, refusal=str(error))
    except PlanningError as error:
        return Row(name=name, limit_nbytes=room.limit_nbytes, refusal=str(error))


def _jit(step: TracedStep, room: Room, announce: Announce) -> Plan:
    """The step as it is, on one device."""
    group = room.cluster.group()
    alone = HostGroup(hosts=1, devices_per_host=1, device=group.device, intra=group.intra, inter=group.inter)
    cluster = Cluster(name=f"one of {room.cluster.name}", groups=(alone,))
    return cheapest_plan("jit", MeshProblems(step=step), [named(cluster)], room.auto.solver)


def _planned(planner: Planner, step: TracedStep, room: Room) -> Plan:
    return cast("Plan", planner.plan(step, room.cluster, PlanOptions()).plan)


def _by(planner: Planner) -> RowPlanner:
    return lambda step, room, announce: _planned(planner, step, room)


def _megatron(step: TracedStep, room: Room, announce: Announce) -> Plan:
    """The cheapest that fits of Megatron's shapes within a host, else the one of least memory."""
    devices, group = room.cluster.n_devices, room.cluster.group()
    sizes = [t for t in TENSOR if group.devices_per_host % t == 0] or [1]
    planned, refused = [], None
    for tensor in sizes:
        announce(f"planning Megatron, {devices // tensor} x {tensor}")
        try:
            planned.append(_planned(Megatron(data=devices // tensor, tensor=tensor), step, room))
        except PlanningError as error:
            refused = error
    if refused is not None and not planned:
        raise refused
    fitting = [plan for plan in planned if plan.peak_nbytes <= room.limit_nbytes]
    if fitting:
        return min(fitting, key=lambda plan: plan.step_seconds)
    return min(planned, key=lambda plan: plan.peak_nbytes)


def _searched(step: TracedStep, room: Room, announce: Announce) -> Plan:
    """The cheapest that fits of all variants and meshes; an error says what would fit."""
    options = PlanOptions(report=lambda now: announce(f"planning searched: {now.phase}"))
    return cast("Plan", room.auto.plan(step, room.cluster, options).plan)


RowPlanner = Callable[[TracedStep, Room, Announce], Plan]
"""A function that makes the plan of a row; it announces what it is doing."""

PLANNERS: dict[str, RowPlanner] = {
    "jit": _jit,
    "data parallel": _by(DataParallel()),
    "ZeRO-1/2": _by(Zero(2)),
    "ZeRO-3": _by(Zero(3)),
    "Megatron": _megatron,
    "searched": _searched,
}
"""The rows of the table, by name. ZeRO's stages 1 and 2 are one plan: gradients are scattered as soon as summed."""
