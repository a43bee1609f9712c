"""Everything that planning chose for one program on one cluster: frozen, printable, comparable, storable.

A saved plan is a planner: `autopar.Manual("plan.json")` replays it without solving.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from passes.cluster import Cluster, Collective, Mesh
from passes.errors import InternalError, PlanMismatchError, PlanningError, explain
from passes.ir import Graph, TensorType
from passes.placement import Layout
from passes.plan import diff as plan_diff
from passes.plan import json as plan_json
from passes.plan import legality
from passes.plan import text as plan_text
from passes.plan.diff import PlanDiff
from passes.plan.face import AnyPlan
from passes.plan.parts import MemoryReport, Operator, Solution
from passes.sharding import ShardingSpec
from passes.text import Table

__all__ = ["SCHEMA", "MemoryReport", "Operator", "Plan", "PlanDiff", "Solution"]

SCHEMA = 1
"""The version of a plan's file that is written, and the newest that is read."""

SomePlan = TypeVar("SomePlan", bound="Plan")


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """The placements of every operator, input and output, and what they cost.

    `seconds` holds the predicted step time by cause (`compute`, `memory`, `communication`, ...); `nbytes` the peak
    bytes of one device by cause. `replicated` names operators that had no rule, as `primitive at source`.
    `input_names` and `output_names` are argument paths in the user's words; `input_types` and `output_types` are for
    people, and empty where the planner did not keep them. `phases` are the same seconds by phase of the step, of which
    `computing` are spent on operators and not on moving arrays. `flops` are what the model asks all devices together
    for, by dtype: its products without what is computed again (passes/intra_op/flops.py). With
    `refetch`, the backward pass brings weights to where it wants them anew, and nothing keeps them in between. `remat`
    is what each layer keeps for the backward pass (passes/transforms/remat.py), empty for the step as it was written.
    The inputs at `offloaded` stay in the host's memory between steps. `memory` is what more there is to say of one
    device's. If numbers were counted for other placements, before an edit of the file, `counted_for` is the fingerprint
    of those.
    """

    fingerprint: str
    cluster: Cluster
    mesh: Mesh
    operators: tuple[Operator, ...]
    inputs: tuple[ShardingSpec, ...]
    outputs: tuple[ShardingSpec, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    collectives: tuple[Collective, ...]
    seconds: Mapping[str, float]
    nbytes: Mapping[str, int]
    solution: Solution
    replicated: tuple[str, ...] = ()
    microbatches: int = 1
    input_types: tuple[TensorType, ...] = ()
    output_types: tuple[TensorType, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict[str, float])
    computing: Mapping[str, float] = field(default_factory=dict[str, float])
    flops: Mapping[str, float] = field(default_factory=dict[str, float])
    refetch: bool = True
    remat: tuple[str, ...] = ()
    offloaded: tuple[int, ...] = ()
    memory: MemoryReport | None = None
    counted_for: str = ""

    @property
    def is_stale(self) -> bool:
        """Whether its placements were edited in a file after its numbers were counted."""
        return bool(self.counted_for)

    @property
    def placed(self) -> str:
        """A fingerprint of all that its numbers follow from: placements, mesh, and how the step is run."""
        placements = [plan_text.placement_text(operator.placement) for operator in plan_text.everything(self.operators)]
        inside = [
            (layout.inputs, layout.outputs)
            for operator in plan_text.everything(self.operators)
            for layout in operator.placement.bodies
        ]
        specs = [[str(spec) for spec in several] for pair in ((self.inputs, self.outputs), *inside) for several in pair]
        how = (str(self.mesh), self.microbatches, self.refetch, self.remat, self.offloaded)
        return hashlib.sha256(repr((how, specs, placements)).encode()).hexdigest()[:16]

    @property
    def planner(self) -> str:
        """Who made it."""
        return self.solution.planner

    @property
    def n_devices(self) -> int:
        return self.mesh.size

    @property
    def shape(self) -> str:
        return str(self.mesh)

    @property
    def is_interrupted(self) -> bool:
        """Whether it is the best until a search was interrupted."""
        return self.solution.is_interrupted

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return sum(self.seconds.values())

    @property
    def peak_nbytes(self) -> int:
        """Predicted peak bytes on one device."""
        return sum(self.nbytes.values())

    @property
    def offloaded_nbytes(self) -> tuple[int, ...]:
        """Bytes of one device's share of each input that is in the host's memory between steps."""
        specs_and_types = ((self.inputs[i], self.input_types[i]) for i in self.offloaded)
        return tuple(spec.local_nbytes(type, self.mesh) for spec, type in specs_and_types)

    @property
    def gap(self) -> float:
        """How far the answer may be from the best of its kind; 0 is proven optimal."""
        return self.solution.gap

    @property
    def layout(self) -> Layout:
        """Where everything is."""
        placements = tuple(operator.placement for operator in self.operators)
        return Layout(inputs=self.inputs, placements=placements, outputs=self.outputs)

    def check(self, graph: Graph) -> None:
        """Raises PlanMismatchError unless this plan was made for these operations and shapes, and is legal for them."""
        if graph.fingerprint != self.fingerprint:
            raise PlanMismatchError(
                explain(
                    f"plan {self.fingerprint} of {len(self.operators)} operators and {len(self.inputs)} inputs",
                    f"this function traces to program {graph.fingerprint} of {len(graph.nodes)} operators and "
                    f"{len(graph.inputs)} inputs, and a plan belongs to one function with its shapes and dtypes",
                    self._first_difference(graph),
                    "plan again, or call the function with the arguments that the plan was made for",
                )
            )
        self.verify(graph)

    def _first_difference(self, graph: Graph) -> str:
        """The first input whose name or type is not the plan's, in words; empty if all agree."""
        theirs = zip(graph.input_names, (graph.types[v] for v in graph.inputs), strict=False)
        for (name, type), planned_name, planned in zip(theirs, self.input_names, self.input_types, strict=False):
            if (name, type) != (planned_name, planned):
                return f"the first input that differs is {name} {type}; the plan has {planned_name} {planned}"
        return ""

    def verify(self, graph: Graph) -> None:
        """Raises PlanMismatchError unless every placement fits its types and is one that the operator's rule allows."""
        legality.verify_values("input", self.inputs, self.input_names, graph.inputs, graph, self.mesh)
        legality.verify_values("output", self.outputs, self.output_names, graph.outputs, graph, self.mesh)
        legality.verify_operators(self.operators, graph, self.mesh)

    def tables(self, *, operators: bool = False) -> tuple[Table, ...]:
        """The plan as tables, header first; `operators` adds every operator and every line that communicates."""
        solution = replace(self.solution, status="edited", bound=0.0) if self.is_stale else self.solution
        header = plan_text.header(
            self.fingerprint, self.cluster, self.mesh, solution, self.microbatches, self.remat, self.offloaded
        )
        numbers = (
            plan_text.seconds_table(self.seconds),
            plan_text.nbytes_table(self.nbytes),
            *(plan_text.memory_tables(self.memory) if self.memory else ()),
            plan_text.collectives_table(self.collectives, every=operators),
        )
        all_tables = [
            replace(header, note=plan_text.STALE) if self.is_stale else header,
            *(replace(t, title=f"{t.title}, before the edit") if self.is_stale else t for t in numbers),
            plan_text.inputs_table(self.input_names, self.input_types, self.inputs, self.mesh),
        ]
        if self.replicated:
            all_tables.append(plan_text.replicated_table(self.replicated, self.operators))
        if operators:
            all_tables.append(plan_text.operators_table(self.operators))
        return tuple(all_tables)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to `other`."""
        return _difference(self, other)

    def to_json(self) -> dict[str, object]:
        """The plan as JSON data; `from_json` gives an equal plan back."""
        if self.mesh.cluster != self.cluster:
            raise InternalError("a plan's mesh lies on another cluster than the plan")
        numbers = {"phases": self.phases, "computing": self.computing, "flops": self.flops}
        return {
            "autopar": plan_json.version(),
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "cluster": self.cluster.to_json(),
            "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "solution": plan_json.solution_to_json(self.solution),
            "microbatches": self.microbatches,
            **({} if self.refetch else {"refetch": False}),
            **({"remat": list(self.remat)} if self.remat else {}),
            **({"offloaded": list(self.offloaded)} if self.offloaded else {}),
            "placed": self.counted_for or self.placed,
            **({"edited": True} if self.is_stale else {}),
            "seconds": _numbers(self.seconds),
            **{name: _numbers(values) for name, values in numbers.items() if values},
            "nbytes": dict(self.nbytes),
            **({"memory": plan_json.memory_to_json(self.memory)} if self.memory else {}),
            "inputs": plan_json.values_to_json(self.input_names, self.input_types, self.inputs),
            "outputs": plan_json.values_to_json(self.output_names, self.output_types, self.outputs),
            "collectives": [plan_json.collective_to_json(c) for c in self.collectives],
            "replicated": list(self.replicated),
            "operators": plan_json.operators_to_json(self.operators),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """The plan that `to_json` described. Raises PlanningError, with the place, for anything that is not one."""
        return _read(cls, data)


def _difference(before: Plan, after: Plan) -> PlanDiff:
    """What changes from one plan to another."""
    mine, theirs = ([op.primitive for op in plan_text.everything(plan.operators)] for plan in (before, after))
    aligned = mine == theirs
    tensors, sent = plan_diff.collective_amounts(before.collectives, after.collectives)
    return PlanDiff(
        words=plan_diff.changes(
            {
                "program": (before.fingerprint, after.fingerprint),
                "cluster": (before.cluster.name, after.cluster.name),
                "mesh": (str(before.mesh), str(after.mesh)),
                "planner": (before.solution.planner, after.solution.planner),
                "solver": (before.solution.status, after.solution.status),
                "gap": (plan_text.gap(before.solution), plan_text.gap(after.solution)),
                "microbatches": (f"{before.microbatches:,}", f"{after.microbatches:,}"),
                "offloaded": (f"{len(before.offloaded)}", f"{len(after.offloaded)}"),
                "numbers": (_when_counted(before), _when_counted(after)),
                "recomputation": (plan_text.kept(before.remat), plan_text.kept(after.remat)),
            }
        ),
        seconds=plan_diff.amounts(before.seconds, after.seconds),
        nbytes=plan_diff.amounts(before.nbytes, after.nbytes),
        tensors=tensors,
        sent_nbytes=sent,
        inputs=plan_diff.value_changes((before.input_names, after.input_names), (before.inputs, after.inputs)),
        operators=plan_diff.operator_changes(before.operators, after.operators) if aligned else (),
        aligned=aligned,
    )


def _read(kind: type[SomePlan], data: object) -> SomePlan:
    """The plan that JSON data describe."""
    read = plan_json.as_object(data, "the plan")
    if not {"schema", "fingerprint"} <= read.data.keys():
        raise PlanningError("this is not a plan: it has no schema or no fingerprint; `autopar plan` writes plans")
    if "pipeline" in read.data:
        raise PlanningError("this is the plan of a pipeline; autopar.PipelinePlan.load reads it")
    if read.of("schema") != SCHEMA:
        writer = read.data.get("autopar", "(unknown)")
        raise PlanningError(
            f"the plan has schema {read.of('schema')!r}, written by autopar {writer}; this is autopar "
            f"{plan_json.version()}, which reads schema {SCHEMA}. Plan again, or use that autopar"
        )
    cluster = Cluster.from_json(read.object("cluster").data)
    mesh = plan_json.mesh_from_json(read.object("mesh"), cluster)
    inputs = plan_json.values_from_json(read.list("inputs"), mesh, "input")
    outputs = plan_json.values_from_json(read.list("outputs"), mesh, "output")
    seconds, nbytes = read.object("seconds"), read.object("nbytes")
    collectives, replicated = read.list("collectives"), read.list("replicated")
    remat = read.list("remat") if "remat" in read.data else ()
    offloaded = read.list("offloaded") if "offloaded" in read.data else ()
    plan = kind(
        fingerprint=read.text("fingerprint"),
        cluster=cluster,
        mesh=mesh,
        operators=plan_json.operators_from_json(read.list("operators"), mesh),
        inputs=inputs.specs,
        outputs=outputs.specs,
        input_names=inputs.names,
        output_names=outputs.names,
        collectives=tuple(
            plan_json.collective_from_json(plan_json.as_object(entry, f"collectives[{i}]"))
            for i, entry in enumerate(collectives)
        ),
        seconds={cause: seconds.float(cause) for cause in seconds.data},
        nbytes={cause: nbytes.int(cause) for cause in nbytes.data},
        solution=plan_json.solution_from_json(read.object("solution")),
        replicated=tuple(plan_json.as_text(entry, f"replicated[{i}]") for i, entry in enumerate(replicated)),
        microbatches=read.int("microbatches"),
        input_types=inputs.types,
        output_types=outputs.types,
        phases=_floats(read, "phases"),
        computing=_floats(read, "computing"),
        flops=_floats(read, "flops"),
        refetch=read.data.get("refetch", True) is True,
        offloaded=plan_json.positions(offloaded, len(inputs.specs), "offloaded"),
        memory=plan_json.memory_from_json(read.object("memory")) if "memory" in read.data else None,
        remat=tuple(plan_json.as_text(entry, f"remat[{i}]") for i, entry in enumerate(remat)),
    )
    counted_for = read.text("placed") if "placed" in read.data else plan.placed  # files have it since 2026-11
    return plan if counted_for == plan.placed else replace(plan, counted_for=counted_for)


def _numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    return {name: plan_json.number(value) for name, value in values.items()}


def _floats(read: plan_json.Fields, name: str) -> dict[str, float]:
    """The numbers of a field by name; none where a file does not have it."""
    values = read.object(name) if name in read.data else None
    return {key: values.float(key) for key in values.data} if values else {}


def _when_counted(plan: Plan) -> str:
    return "before an edit" if plan.is_stale else "as placed"
