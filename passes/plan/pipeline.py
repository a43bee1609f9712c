"""A pipeline's plan: a plan for each stage on its own submesh, and the schedule that runs microbatches through them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Self, TypeVar, cast

from passes.cluster import Cluster, Collective
from passes.errors import PlanMismatchError, PlanningError, explain
from passes.inter_op import (
    NamedSchedule,
    Schedule,
    StageCost,
    Task,
    Timeline,
    Transfer,
    peaks,
    simulate,
)
from passes.inter_op import build as build_schedule
from passes.ir import Graph, StatePairs
from passes.plan import account
from passes.plan import json as plan_json
from passes.plan import text as plan_text
from passes.plan.json import Fields
from passes.plan.parts import Alternative, merged
from passes.plan.plan import AnyPlan, Plan, Specs
from passes.plan.reading import SCHEMA, check_schema
from passes.sharding import replicated
from passes.step import MOST_CHUNKS, Step, Variant
from passes.text import Column, Table, quantities
from passes.transforms import Stages, kept_of, stages

SomePlan = TypeVar("SomePlan", bound="PipelinePlan")


@dataclass(frozen=True, kw_only=True, repr=False)
class PipelinePlan(AnyPlan):
    """The plans of a step's stages, each on a submesh of its own, and the schedule of microbatches through them.

    `stages[k]` plans stage k, which begins at the loop body's forward node `firsts[k]`, on the devices from
    `offsets[k]`; every submesh has `chunks` stages in turn. `costs` are the stages' seconds and bytes, `transfers` the
    seconds between neighbours. `remat` is what each layer of the step keeps for the backward pass, empty for the step
    as it was written.
    """

    fingerprint: str
    cluster: Cluster
    planner: str
    schedule_name: str
    chunks: int
    microbatches: int
    firsts: tuple[int, ...]
    stages: tuple[Plan, ...]
    costs: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]
    sent_nbytes: tuple[int, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    remat: tuple[str, ...] = ()
    met: tuple[Alternative, ...] = ()  # pyright: ignore[reportIncompatibleMethodOverride] # a property of others

    @cached_property
    def schedule(self) -> Schedule:
        """The order of tasks on every submesh."""
        return build_schedule(self.schedule_name, len(self.stages), self.microbatches, self.chunks)

    @cached_property
    def timeline(self) -> Timeline:  # pyright: ignore[reportIncompatibleMethodOverride] # simulated once
        """The simulated timeline: when each task runs."""
        return self.simulated(self.costs, self.transfers)

    def simulated(self, costs: Sequence[StageCost], transfers: Sequence[Transfer]) -> Timeline:
        """The timeline of tasks with these costs of stages and transfers."""
        device = self.cluster.group().device
        dispatch, overlap = device.dispatch_seconds, device.send_overlap
        return simulate(self.schedule, costs, transfers, dispatch_seconds=dispatch, overlap=overlap)

    @property
    def programs(self) -> tuple[Plan, ...]:
        return self.stages

    @property
    def submeshes(self) -> tuple[tuple[Plan, ...], ...]:
        return tuple(self.stages[group :: self.groups] for group in range(self.groups))

    def ended(self, status: str) -> Self:
        return replace(self, stages=tuple(stage.ended(status) for stage in self.stages))

    def beside(self, alternatives: Sequence[Alternative]) -> Self:
        return replace(self, met=merged(self.met, alternatives))

    @property
    def stage_costs(self) -> tuple[StageCost, ...]:
        return self.costs

    def on(self, cluster: Cluster) -> Self:
        return replace(self, cluster=cluster, stages=tuple(stage.on(cluster) for stage in self.stages))

    def variant(self, stages: int = 0) -> Variant:
        return Variant(microbatches=self.microbatches, kept=kept_of(self.remat), stages=stages or len(self.stages))

    def of_variant(self, variant: Variant) -> Self:
        return replace(self, remat=variant.kept)

    def step_of(self, step: Step) -> Step:
        """The variant of a step that it is of, by its fingerprint; if there is none, the variant for its number of
        stages.

        A saved plan does not say for how many stages loops were chunked: the search chunks them for layers.
        """
        for count in range(MOST_CHUNKS + 1):
            variant = step.variant(self.variant(count))
            if variant.graph.fingerprint == self.fingerprint:
                return variant
        return step.variant(self.variant())

    def graphs(self, graph: Graph, state_pairs: StatePairs) -> tuple[Graph, ...]:
        return tuple(part.graph for part in stages.cut(graph, self.firsts, state_pairs).parts)

    def specs(self, graph: Graph, state_pairs: StatePairs) -> tuple[Specs, Specs]:
        return _specs(self.stages, stages.cut(graph, self.firsts, state_pairs), graph)

    @property
    def facts(self) -> dict[str, str]:
        return {
            **super().facts,
            "stages": f"{len(self.stages)}",
            "mesh": "; ".join(str(stage.mesh) for stage in self.stages[: self.groups]),
            "schedule": self.schedule_name,
            "chunks": f"{self.chunks}",
            "cut before": ", ".join(f"node {first}" for first in self.firsts[1:]),
            "bubble": quantities.share(self.bubble, 1),
            "recomputation": plan_text.kept(self.remat),
        }

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule runs the halves of the backward apart."""
        return any(task.kind == "input_gradient" for group in self.schedule.groups for task in group)

    def order(self) -> tuple[Task, ...]:
        """All tasks in the one order in which they are issued."""
        return self.timeline.tasks

    @property
    def groups(self) -> int:
        """The number of submeshes."""
        return len(self.stages) // self.chunks

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first device of each stage."""
        ends = [0, *accumulate(plan.mesh.size for plan in self.stages[: self.groups])]
        return tuple(ends[k % self.groups] for k in range(len(self.stages)))

    @property
    def n_devices(self) -> int:
        return sum(plan.mesh.size for plan in self.stages[: self.groups])

    @property
    def shape(self) -> str:
        return f"{len(self.stages)} stages"

    @cached_property
    def step_seconds(self) -> float:  # pyright: ignore[reportIncompatibleMethodOverride] # simulated once
        """Predicted seconds of one step."""
        return _step_seconds(self)

    @property
    def bubble(self) -> float:
        """The share of all device seconds in which a stage waits."""
        return self.timeline.bubble

    @cached_property
    def peak_nbytes(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] # simulated once
        """Predicted peak bytes on the fullest device."""
        return _without_timeline(self).peak_nbytes(self.costs)

    @property
    def nbytes(self) -> Mapping[str, int]:  # pyright: ignore[reportIncompatibleVariableOverride] # a field of others
        """Predicted peak bytes on the fullest device by cause."""
        return max(peaks(self.schedule, self.costs), key=lambda causes: sum(causes.values()))

    @property
    def gap(self) -> float:
        """The largest gap of a stage's plan; the cut into stages has no bound."""
        return max(plan.gap for plan in self.stages)

    @property
    def collectives(  # pyright: ignore[reportIncompatibleVariableOverride] # a field of others
        self,
    ) -> tuple[Collective, ...]:
        """The collectives of all stages."""
        return tuple(c for plan in self.stages for c in plan.collectives)

    def verify(self) -> None:
        """Raises PlanningError unless stages, costs and devices agree and the schedule can run."""
        _verify(self)

    def check(self, graph: Graph, state_pairs: StatePairs = ()) -> None:
        """Raises PlanMismatchError unless this plan was made for this step, and every stage's is legal for its part."""
        if graph.fingerprint != self.fingerprint:
            raise _of_another_program(self, graph)
        for part, plan in zip(self.graphs(graph, state_pairs), self.stages, strict=True):
            plan.check(part)

    def to_json(self) -> dict[str, object]:
        """The plan as JSON data; `from_json` gives an equal plan back."""
        return _as_json(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """The plan that `to_json` described. Raises PlanningError, with the place, for anything that is not one."""
        return _read(cls, data)

    def tables(self, *, operators: bool = False) -> tuple[Table, ...]:
        """The pipeline as tables, then each stage's own if `operators`."""
        all_tables = [_header(self), _stages_table(self), self.timeline.table()]
        if operators:
            all_tables.extend(table for plan in self.stages for table in plan.tables(operators=True))
        return tuple(all_tables)


def _without_timeline(plan: PipelinePlan) -> NamedSchedule:
    """The schedule of a plan, whose seconds and bytes take less time than its timeline."""
    return NamedSchedule(plan.schedule_name, len(plan.stages), plan.microbatches, plan.chunks)


def _step_seconds(plan: PipelinePlan) -> float:
    device = plan.cluster.group().device
    return _without_timeline(plan).seconds(plan.costs, plan.transfers, device.dispatch_seconds, device.send_overlap)


def _of_another_program(plan: PipelinePlan, graph: Graph) -> PlanMismatchError:
    """The error of a plan that was made for another program than `graph`."""
    return PlanMismatchError(
        explain(
            f"plan {plan.fingerprint} of a pipeline of {len(plan.stages)} stages",
            f"this function traces to program {graph.fingerprint}, and a plan belongs to one function with its "
            "shapes and dtypes",
            "",
            "plan again, or call the function with the arguments that the plan was made for",
        )
    )


def _header(plan: PipelinePlan) -> Table:
    facts: Mapping[str, str] = {
        "program": plan.fingerprint,
        "cluster": plan.cluster.name,
        "planner": plan.planner,
        "schedule": plan.schedule_name,
        "microbatches": f"{plan.microbatches:,}",
        "step": quantities.seconds(plan.step_seconds),
        "bubble": quantities.share(plan.bubble, 1),
        **({"recomputation": plan_text.kept(plan.remat)} if plan.remat else {}),
    }
    columns = (Column(heading=""), Column(heading="", flexible=True))
    stale = any(stage.is_stale for stage in plan.stages)
    note = plan_text.STALE if stale else ""
    return Table(title="Pipeline", columns=columns, rows=tuple(facts.items()), note=note)


def _stages_table(plan: PipelinePlan) -> Table:
    headings = ("stage", "mesh", "forward", "backward", "update", "sent", "peak")
    columns = tuple(Column(heading=heading, right=heading != "mesh") for heading in headings)
    rows = tuple(
        (
            str(k),
            str(stage.mesh),
            quantities.seconds(cost.forward_seconds),
            quantities.seconds(cost.backward_seconds),
            quantities.seconds(cost.finish_seconds),
            quantities.nbytes(sent),
            quantities.nbytes(plan.timeline.peak_nbytes[k % plan.groups]),
        )
        for k, (stage, cost, sent) in enumerate(zip(plan.stages, plan.costs, plan.sent_nbytes, strict=True))
    )
    return Table(title="Stages, a microbatch", columns=columns, rows=rows)


def _specs(plans: Sequence[Plan], stages: Stages, graph: Graph) -> tuple[Specs, Specs]:
    """(inputs, outputs): where each array of a step lies, on the mesh of the stage that holds it."""
    parts = list(zip(stages.parts, plans, strict=True))
    entering = [dict(zip(part.graph.inputs, plan.inputs, strict=True)) for part, plan in parts]
    leaving = [dict(zip(part.graph.outputs, plan.outputs, strict=True)) for part, plan in parts]
    unread = {value: replicated(graph.types[value].rank) for value in graph.inputs}
    inputs = [
        next(specs[value] for specs in (entering[home], *entering, unread) if value in specs)
        for value, home in zip(graph.inputs, stages.input_stages, strict=True)
    ]
    outputs = [leaving[owner][value] for value, owner in zip(graph.outputs, stages.output_stages, strict=True)]
    return tuple(inputs), tuple(outputs)


def _verify(plan: PipelinePlan) -> None:
    """Raises PlanningError unless stages, costs and devices agree and the schedule can run."""
    lists = (plan.stages, plan.firsts, plan.costs, plan.sent_nbytes, (*plan.transfers, None))
    if len(set(map(len, lists))) > 1:
        raise PlanningError(
            "a pipeline has a first node, a cost and the bytes it sends for each stage, and a transfer between "
            "neighbours; plan again"
        )
    if plan.chunks < 1 or len(plan.stages) % plan.chunks:
        raise PlanningError(f"{len(plan.stages)} stages in {plan.chunks} chunks a submesh; plan again")
    sizes = [stage.mesh.size for stage in plan.stages]
    if sizes != sizes[: plan.groups] * plan.chunks:
        raise PlanningError(f"stages that share submeshes have {sizes} devices; plan again")
    if plan.n_devices > plan.cluster.n_devices:
        raise PlanningError(f"a pipeline of {plan.n_devices} devices on {plan.cluster.n_devices}; plan again")
    plan.schedule.verify()


def _as_json(plan: PipelinePlan) -> dict[str, object]:
    """The plan as JSON data, which `_read` reads."""
    return {
        "autopar": plan_json.version(),
        "schema": SCHEMA,
        "fingerprint": plan.fingerprint,
        "cluster": plan.cluster.to_json(),
        "pipeline": {
            "planner": plan.planner,
            "schedule": plan.schedule_name,
            "chunks": plan.chunks,
            "microbatches": plan.microbatches,
            "firsts": list(plan.firsts),
            "sent_nbytes": list(plan.sent_nbytes),
            **({"remat": list(plan.remat)} if plan.remat else {}),
            **account.alternatives_to_json(plan.met),
        },
        "input_names": list(plan.input_names),
        "output_names": list(plan.output_names),
        "costs": [asdict(cost) for cost in plan.costs],
        "transfers": [asdict(transfer) for transfer in plan.transfers],
        "stages": [stage.to_json() for stage in plan.stages],
    }


def _read(kind: type[SomePlan], data: object) -> SomePlan:
    """The plan that JSON data describe."""
    read = plan_json.as_object(data, "the plan")
    if "pipeline" not in read.data:
        raise PlanningError("this is not the plan of a pipeline; autopar.Plan.load reads the others")
    check_schema(read)
    how = read.object("pipeline")

    def numbers(fields: Fields, name: str) -> tuple[int, ...]:
        return tuple(plan_json.as_int(x, f"{name}[{i}]") for i, x in enumerate(fields.list(name)))

    def texts(fields: Fields, name: str) -> tuple[str, ...]:
        return tuple(plan_json.as_text(x, f"{name}[{i}]") for i, x in enumerate(fields.list(name)))

    plan = kind(
        fingerprint=read.text("fingerprint"),
        cluster=Cluster.from_json(read.object("cluster").data),
        planner=how.text("planner"),
        schedule_name=how.text("schedule"),
        chunks=how.int("chunks"),
        microbatches=how.int("microbatches"),
        firsts=numbers(how, "firsts"),
        stages=tuple(Plan.from_json(stage) for stage in read.list("stages")),
        costs=account.stage_costs_from_json(read.list("costs")),
        transfers=account.transfers_from_json(read.list("transfers")),
        sent_nbytes=numbers(how, "sent_nbytes"),
        input_names=texts(read, "input_names"),
        output_names=texts(read, "output_names"),
        remat=texts(how, "remat") if "remat" in how.data else (),
        met=account.alternatives_from_json(how),
    )
    plan.verify()
    return plan


def load_plan(source: object, call: str = "Manual") -> AnyPlan:
    """The plan in a file, or this plan itself; `call` is how the user gave it, for errors. Raises PlanningError."""
    if isinstance(source, AnyPlan):
        return source
    if not isinstance(source, str | os.PathLike):
        rule = "a saved plan is a path, an autopar.Plan or an autopar.PipelinePlan"
        remedy = "pass what plan.save(path) wrote, or the plan itself"
        raise PlanningError(explain(f"{call}({source!r:.60})", rule, "", remedy))
    path = cast("str | os.PathLike[str]", source)
    try:
        return plan_from_json(plan_json.read(path))
    except PlanningError as error:
        raise type(error)(f"{path}: {error}") from error


def plan_from_json(data: object) -> AnyPlan:
    """The plan that JSON data describe, of one program or of a pipeline. Raises PlanningError."""
    kind = PipelinePlan if "pipeline" in plan_json.as_object(data, "the plan").data else Plan
    return kind.from_json(data)
