"""Plans of one program on one cluster as values that can be printed, compared and saved.

A saved plan is a planner: `autopar.Manual("plan.json")` replays it without solving.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from passes.cluster import Cluster, Collective, Mesh
from passes.errors import InternalError
from passes.inter_op import StageCost, Timeline
from passes.ir import Graph, StatePairs, TensorType
from passes.placement import Layout
from passes.plan import account, legality
from passes.plan import diff as plan_diff
from passes.plan import json as plan_json
from passes.plan import text as plan_text
from passes.plan.diff import PlanDiff
from passes.plan.parts import Alternative, LayerCost, MemoryReport, Operator, Solution, merged
from passes.plan.pipeline_diff import PipelineDiff
from passes.plan.reading import SCHEMA, read_plan
from passes.plan.storable import Storable, renamed
from passes.sharding import ShardingSpec
from passes.step import Step, Variant
from passes.text import Table
from passes.transforms import kept_of

Specs = tuple[ShardingSpec, ...]


class AnyPlan(Storable):
    """A plan of one mesh or of a pipeline: what was chosen, and what a step is predicted to cost."""

    fingerprint: str
    cluster: Cluster
    microbatches: int
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    planner: str
    collectives: tuple[Collective, ...]
    """The collectives of one step, in all of its programs."""

    nbytes: Mapping[str, int]
    """Predicted peak bytes on the fullest device, by cause."""

    def __repr__(self) -> str:  # its fields are tens of thousands of characters
        return f"<{self.planner} plan, {self.shape}>"

    @property
    @abstractmethod
    def programs(self) -> tuple[Plan, ...]:
        """The plan of each program that it consists of: itself alone, or one for each stage."""

    @property
    def submeshes(self) -> tuple[tuple[Plan, ...], ...]:
        """The plans of each group of devices, which runs them in turn."""
        return (self.programs,)

    @property
    @abstractmethod
    def timeline(self) -> Timeline | None:
        """The simulated timeline of a pipeline's tasks; None for a single program."""

    @property
    def stage_costs(self) -> tuple[StageCost, ...]:
        """The cost of each stage of a pipeline; empty for a single program."""
        return ()

    @property
    @abstractmethod
    def met(self) -> tuple[Alternative, ...]:
        """The plans that the search met and did not take, cheapest first."""

    @abstractmethod
    def beside(self, alternatives: Sequence[Alternative]) -> Self:
        """The plan with further alternatives that were met and not taken."""

    @property
    def facts(self) -> dict[str, str]:
        """Everything that was chosen, in words, by name."""
        return {
            "program": self.fingerprint,
            "cluster": self.cluster.name,
            "microbatches": f"{self.microbatches:,}",
            "planner": self.planner,
        }

    @property
    @abstractmethod
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""

    @property
    @abstractmethod
    def peak_nbytes(self) -> int:
        """Predicted peak bytes on the fullest device."""

    @property
    @abstractmethod
    def gap(self) -> float:
        """The share by which its seconds may be above the optimum of its kind; 0 is proven optimal."""

    @property
    @abstractmethod
    def n_devices(self) -> int:
        """The number of devices that it runs on."""

    @property
    @abstractmethod
    def shape(self) -> str:
        """Its mesh or its stages, in words."""

    @property
    def is_interrupted(self) -> bool:
        """Whether it is the best plan of a search that was interrupted."""
        return any(program.solution.is_interrupted for program in self.programs)

    @abstractmethod
    def ended(self, status: str) -> Self:
        """The plan with what ended its search, in words."""

    @abstractmethod
    def on(self, cluster: Cluster) -> Self:
        """The same placements on the first devices of another cluster, with the seconds and bytes of this plan."""

    @abstractmethod
    def variant(self, stages: int = 0) -> Variant:
        """The variant of the step that it plans; a pipeline's loops are chunked for `stages` stages (0: its own)."""

    @abstractmethod
    def of_variant(self, variant: Variant) -> Self:
        """The plan, with the record that it plans this variant of the step."""

    def step_of(self, step: Step) -> Step:
        """The variant of a step that it plans."""
        return step.variant(self.variant())

    @abstractmethod
    def graphs(self, graph: Graph, state_pairs: StatePairs) -> tuple[Graph, ...]:
        """The graph of each of its programs, cut from the graph of the step."""

    @abstractmethod
    def specs(self, graph: Graph, state_pairs: StatePairs) -> tuple[Specs, Specs]:
        """(inputs, outputs): the placement of each array of the step, on the mesh of the program that holds it."""

    @abstractmethod
    def check(self, graph: Graph, state_pairs: StatePairs = ()) -> None:
        """Raises PlanMismatchError unless it was made for this step, and is legal for it."""

    def diff(self, other: AnyPlan) -> PlanDiff | PipelineDiff:
        """The differences from this plan to `other`. Raises PlanningError for anything but a plan."""
        if plan_diff.checked(other, AnyPlan).timeline is None and self.timeline is None:
            return _difference(*self.programs, *other.programs)
        return PipelineDiff.between(
            (self.facts, other.facts),
            (self.step_seconds, other.step_seconds),
            (self.peak_nbytes, other.peak_nbytes),
            stages=[_difference(*pair) for pair in zip(self.programs, other.programs, strict=False)]
            if len(self.programs) == len(other.programs)
            else (),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(AnyPlan):
    """The placements of every operator, input and output of a program on a mesh, and what they cost.

    `seconds` holds the predicted step time by cause (`compute`, `copies`, `all_reduce`, ...), `phases` the same seconds
    by phase, of which `computing` are spent on operators; `nbytes` are the peak bytes of one device by cause. `flops`
    are the model's on all devices by dtype, without recomputation (passes/intra_op/flops.py). `replicated` names
    operators without a rule, as `primitive at source`. `input_names` and `output_names` are argument paths in the
    user's words; `input_types` and `output_types` are for people, and may be empty. With `regather`, weights are
    gathered again for the backward pass, and not kept in between. `remat` is what each layer keeps for the backward
    pass (passes/transforms/remat.py), empty for the step as it was written. The inputs at `offloaded` are in the host's
    memory between steps. `memory` reports on one device's memory, and `layers` on the cost of each layer. If the
    placements were edited in a file after the numbers were counted, `counted_for` is the fingerprint of the placements
    before.
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
    regather: bool = True
    remat: tuple[str, ...] = ()
    offloaded: tuple[int, ...] = ()
    memory: MemoryReport | None = None
    layers: tuple[LayerCost, ...] = ()
    counted_for: str = ""
    refetch = renamed("regather")

    @property
    def is_stale(self) -> bool:
        """Whether its placements were edited in a file after its numbers were counted."""
        return bool(self.counted_for)

    @property
    def when_counted(self) -> str:
        """The state of its numbers as text: counted for these placements or for others."""
        return "before an edit" if self.is_stale else "as placed"

    @property
    def placed(self) -> str:
        """A fingerprint of all that its numbers follow from: placements, mesh, and how the step is run."""
        how = (str(self.mesh), self.microbatches, self.regather, self.remat, self.offloaded)
        return plan_text.digest(self.operators, (self.inputs, self.outputs), how)

    @property
    def planner(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] # a field of others
        """The name of the planner that made it."""
        return self.solution.planner

    @property
    def n_devices(self) -> int:
        return self.mesh.size

    @property
    def shape(self) -> str:
        return str(self.mesh)

    @property
    def programs(self) -> tuple[Plan, ...]:
        return (self,)

    @property
    def timeline(self) -> None:
        return None

    def ended(self, status: str) -> Self:
        return replace(self, solution=replace(self.solution, status=status))

    @property
    def met(self) -> tuple[Alternative, ...]:
        return self.solution.alternatives

    def beside(self, alternatives: Sequence[Alternative]) -> Self:
        return replace(self, solution=replace(self.solution, alternatives=merged(self.met, alternatives)))

    def on(self, cluster: Cluster) -> Self:
        solution = self.solution if cluster.n_devices <= self.cluster.n_devices else self.solution.unproven()
        return replace(self, cluster=cluster, mesh=replace(self.mesh, cluster=cluster), solution=solution)

    def variant(self, stages: int = 0) -> Variant:
        return Variant(microbatches=self.microbatches, kept=kept_of(self.remat), offload=bool(self.offloaded))

    def of_variant(self, variant: Variant) -> Self:
        return replace(self, microbatches=variant.count, remat=variant.kept)

    def graphs(self, graph: Graph, state_pairs: StatePairs) -> tuple[Graph, ...]:
        return (graph,)

    def specs(self, graph: Graph, state_pairs: StatePairs) -> tuple[Specs, Specs]:
        return self.inputs, self.outputs

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak_nbytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def offloaded_nbytes(self) -> tuple[int, ...]:
        """Bytes of one device's share of each input that is in the host's memory between steps."""
        specs_and_types = ((self.inputs[i], self.input_types[i]) for i in self.offloaded)
        return tuple(spec.local_nbytes(type, self.mesh) for spec, type in specs_and_types)

    @property
    def gap(self) -> float:
        return self.solution.gap

    @property
    def layout(self) -> Layout:
        """The placements of all values."""
        return Layout(inputs=self.inputs, placements=tuple(o.placement for o in self.operators), outputs=self.outputs)

    def check(self, graph: Graph, state_pairs: StatePairs = ()) -> None:
        if graph.fingerprint != self.fingerprint:
            raise legality.of_another_program(
                self.fingerprint, len(self.operators), graph, self.input_names, self.input_types
            )
        self.verify(graph)

    def verify(self, graph: Graph) -> None:
        """Raises PlanMismatchError unless every placement fits its types and is one that the operator's rule allows."""
        legality.verify_values("input", self.inputs, self.input_names, graph.inputs, graph, self.mesh)
        legality.verify_values("output", self.outputs, self.output_names, graph.outputs, graph, self.mesh)
        legality.verify_operators(self.operators, graph, self.mesh)

    def tables(self, *, operators: bool = False) -> tuple[Table, ...]:
        return _tables(self, operators)

    @property
    def facts(self) -> dict[str, str]:
        return {**super().facts, "stages": "none", "mesh": str(self.mesh)}

    def to_json(self) -> dict[str, object]:
        if self.mesh.cluster != self.cluster:
            raise InternalError("a plan's mesh lies on another cluster than the plan")
        numbers = {"phases": self.phases, "computing": self.computing, "flops": self.flops}
        return {
            "autopar": plan_json.version(),
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "cluster": self.cluster.to_json(),
            "mesh": plan_json.mesh_to_json(self.mesh),
            "solution": account.solution_to_json(self.solution),
            "microbatches": self.microbatches,
            **({} if self.regather else {"regather": False}),
            **({"remat": list(self.remat)} if self.remat else {}),
            **({"offloaded": list(self.offloaded)} if self.offloaded else {}),
            "placed": self.counted_for or self.placed,
            **({"edited": True} if self.is_stale else {}),
            "seconds": plan_json.numbers(self.seconds),
            **{name: plan_json.numbers(values) for name, values in numbers.items() if values},
            "nbytes": dict(self.nbytes),
            **({"memory": plan_json.memory_to_json(self.memory)} if self.memory else {}),
            **({"layers": account.layers_to_json(self.layers)} if self.layers else {}),
            "inputs": plan_json.values_to_json(self.input_names, self.input_types, self.inputs),
            "outputs": plan_json.values_to_json(self.output_names, self.output_types, self.outputs),
            "collectives": [plan_json.collective_to_json(c) for c in self.collectives],
            "replicated": list(self.replicated),
            "operators": plan_json.operators_to_json(self.operators),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        plan = read_plan(data, cls)
        return replace(plan, counted_for="") if plan.counted_for == plan.placed else plan


def _tables(plan: Plan, operators: bool) -> tuple[Table, ...]:
    """The plan as tables, header first."""
    solution = plan.solution.unproven() if plan.is_stale else plan.solution
    header = plan_text.header(
        plan.fingerprint, plan.cluster, plan.mesh, solution, plan.microbatches, plan.remat, plan.offloaded
    )
    numbers = (
        plan_text.seconds_table(plan.seconds, sum(c.seconds(plan.mesh) for c in plan.collectives)),
        plan_text.nbytes_table(plan.nbytes),
        *(plan_text.memory_tables(plan.memory) if plan.memory else ()),
        plan_text.collectives_table(plan.collectives, every=operators),
    )
    return (
        replace(header, note=plan_text.STALE) if plan.is_stale else header,
        *(replace(t, title=f"{t.title}, before the edit") if plan.is_stale else t for t in numbers),
        plan_text.inputs_table(plan.input_names, plan.input_types, plan.inputs, plan.mesh),
        *((plan_text.replicated_table(plan.replicated, plan.operators),) if plan.replicated else ()),
        *((plan_text.operators_table(plan.operators),) if operators else ()),
    )


def _difference(before: Plan, after: Plan) -> PlanDiff:
    """The differences from one plan to another."""
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
                "numbers": (before.when_counted, after.when_counted),
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
