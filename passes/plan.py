"""Everything that planning chose for one program on one cluster: frozen, printable, comparable, storable.

A saved plan is a planner: `autopar.Manual("plan.json")` replays it without solving.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from passes import plan_diff, plan_json, plan_text, quantities
from passes.cluster import Cluster
from passes.collectives import Collective
from passes.errors import InternalError, PlanMismatchError, PlanningError
from passes.ir import Graph, TensorType
from passes.mesh import Mesh
from passes.moves import Placement, is_free
from passes.plan_diff import PlanDiff
from passes.plan_parts import Operator, Solution, Stage
from passes.rules import Factor, ShardingRule, rule_of
from passes.sharding import ShardingSpec
from passes.tables import Table

__all__ = ["SCHEMA", "Operator", "Plan", "PlanDiff", "Solution", "Stage"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The placements of every operator, input and output, and what they cost.

    `seconds` holds the predicted step time by cause (`compute`, `memory`, `communication`, ...); `nbytes` the peak
    bytes of one device by cause. `replicated` names operators that had no rule, as `primitive at source`.
    `input_names` and `output_names` are argument paths in the user's words; `input_types` and `output_types` are for
    people, and empty where the planner did not keep them.
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

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return sum(self.seconds.values())

    @property
    def peak_nbytes(self) -> int:
        """Predicted peak bytes on one device."""
        return sum(self.nbytes.values())

    @property
    def gap(self) -> float:
        """How far the answer may be from the best of its kind; 0 is proven optimal."""
        return self.solution.gap

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(mesh=self.mesh, first=0, last=len(self.operators)),)

    def check(self, graph: Graph) -> None:
        """Raises PlanMismatchError unless this plan was made for these operations and shapes, and is legal for them."""
        if graph.fingerprint != self.fingerprint:
            raise PlanMismatchError(
                f"the plan was made for program {self.fingerprint} ({len(self.operators)} operators, "
                f"{len(self.inputs)} inputs), this function traces to {graph.fingerprint} ({len(graph.nodes)} operators, "
                f"{len(graph.inputs)} inputs); a plan belongs to one function, its shapes and its dtypes. "
                "Plan again, or call the function with the arguments that the plan was made for"
            )
        self.verify(graph)

    def verify(self, graph: Graph) -> None:
        """Raises PlanMismatchError unless every placement fits its types and is one that the operator's rule allows."""
        for kind, specs, values in (("input", self.inputs, graph.inputs), ("output", self.outputs, graph.outputs)):
            if len(specs) != len(values):
                raise PlanMismatchError(f"the plan places {len(specs)} {kind}s, the function has {len(values)}")
            names = self.input_names if kind == "input" else self.output_names
            for i, (spec, value) in enumerate(zip(specs, values, strict=True)):
                _verify_spec(spec, graph.types[value], self.mesh, f"{kind} {names[i] if names else i}")
        if len(self.operators) != len(graph.nodes):
            raise PlanMismatchError(
                f"the plan places {len(self.operators)} operators, the function has {len(graph.nodes)}"
            )
        legal: dict[_Shape, frozenset[Placement]] = {}
        for index in range(len(graph.nodes)):
            self._verify_operator(index, graph, legal)

    def _verify_operator(self, index: int, graph: Graph, legal: dict[_Shape, frozenset[Placement]]) -> None:
        node, operator = graph.nodes[index], self.operators[index]
        where = f"operator {index} ({operator.primitive}{f' at {operator.source}' if operator.source else ''})"
        if node.primitive != operator.primitive:
            raise PlanMismatchError(f"{where} is {node.primitive} in the function")
        if is_free(graph, index):
            return
        rule = rule_of(node, graph)
        sides = [("result", operator.placement.results, node.outputs)]
        if not rule.alias:
            sides.insert(0, ("operand", operator.placement.operands, node.inputs))
        for side, specs, values in sides:
            if len(specs) != len(values):
                raise PlanMismatchError(f"{where} has {len(values)} {side}s, the plan places {len(specs)}")
            for i, (spec, value) in enumerate(zip(specs, values, strict=True)):
                _verify_spec(spec, graph.types[value], self.mesh, f"{where}, {side} {i}")
        if rule.alias:
            return
        shape = (rule.factors, rule.operands, rule.results)
        if shape not in legal:
            legal[shape] = _placements(rule, self.mesh)
        if operator.placement not in legal[shape]:
            nearest = min(legal[shape], key=lambda p: (_distance(p, operator.placement), str(p)))
            raise PlanMismatchError(
                f"{where} is placed {plan_text.placement_text(operator.placement)}, which no sharding of it gives "
                f"({quantities.count(len(legal[shape]), 'placement')} would be legal on mesh {self.mesh}); "
                f"the nearest legal one is {plan_text.placement_text(nearest)}"
            )

    # The text form

    def tables(self, *, operators: bool = False) -> tuple[Table, ...]:
        """The plan as tables, header first; `operators` adds every operator and every line that communicates."""
        found = [
            plan_text.header(self.fingerprint, self.cluster, self.mesh, self.solution, self.microbatches),
            plan_text.seconds_table(self.seconds),
            plan_text.nbytes_table(self.nbytes),
            plan_text.collectives_table(self.collectives, every=operators),
            plan_text.inputs_table(self.input_names, self.input_types, self.inputs, self.mesh),
        ]
        if self.replicated:
            found.append(plan_text.replicated_table(self.replicated))
        if operators:
            found.append(plan_text.operators_table(self.operators))
        return tuple(found)

    def format(self, *, operators: bool = False, width: int = 80) -> str:
        """The plan as text of `width` columns."""
        return "\n\n".join(table.format(width) for table in self.tables(operators=operators))

    def __str__(self) -> str:
        return self.format()

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to `other`."""
        aligned = [op.primitive for op in self.operators] == [op.primitive for op in other.operators]
        tensors, sent = plan_diff.collective_amounts(self.collectives, other.collectives)
        return PlanDiff(
            words=plan_diff.changes(
                {
                    "program": (self.fingerprint, other.fingerprint),
                    "cluster": (self.cluster.name, other.cluster.name),
                    "mesh": (str(self.mesh), str(other.mesh)),
                    "planner": (self.solution.planner, other.solution.planner),
                    "solver": (self.solution.status, other.solution.status),
                    "gap": (plan_text.gap(self.solution), plan_text.gap(other.solution)),
                    "microbatches": (f"{self.microbatches:,}", f"{other.microbatches:,}"),
                }
            ),
            seconds=plan_diff.amounts(self.seconds, other.seconds),
            nbytes=plan_diff.amounts(self.nbytes, other.nbytes),
            tensors=tensors,
            sent_nbytes=sent,
            inputs=plan_diff.value_changes((self.input_names, other.input_names), (self.inputs, other.inputs)),
            operators=plan_diff.operator_changes(self.operators, other.operators) if aligned else (),
            aligned=aligned,
        )

    # Files

    def to_json(self) -> dict[str, object]:
        """The plan as JSON data; `from_json` gives an equal plan back."""
        if self.mesh.cluster != self.cluster:
            raise InternalError("a plan's mesh lies on another cluster than the plan")
        return {
            "autopar": plan_json.version(),
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "cluster": self.cluster.to_json(),
            "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "solution": plan_json.solution_to_json(self.solution),
            "microbatches": self.microbatches,
            "seconds": {cause: plan_json.number(value) for cause, value in self.seconds.items()},
            "nbytes": dict(self.nbytes),
            "inputs": plan_json.values_to_json(self.input_names, self.input_types, self.inputs),
            "outputs": plan_json.values_to_json(self.output_names, self.output_types, self.outputs),
            "collectives": [plan_json.collective_to_json(c) for c in self.collectives],
            "replicated": list(self.replicated),
            "operators": plan_json.operators_to_json(self.operators),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """The plan that `to_json` described. Raises PlanningError, with the place, for anything that is not one."""
        if not isinstance(data, dict) or "schema" not in data or "fingerprint" not in data:
            raise PlanningError("this is not a plan: it has no schema and fingerprint. `autopar plan --out` writes plans")
        read = plan_json.Fields(data)
        if read.of("schema") != SCHEMA:
            raise PlanningError(
                f"the plan has schema {read.of('schema')!r}, written by autopar {data.get('autopar', 'of unknown version')}; "
                f"this autopar reads schema {SCHEMA}. Plan again"
            )
        cluster = Cluster.from_json(read.object("cluster"))
        mesh = plan_json.mesh_from_json(read.object("mesh"), cluster)
        input_names, input_types, inputs = plan_json.values_from_json(read.of("inputs"), mesh, "input")
        output_names, output_types, outputs = plan_json.values_from_json(read.of("outputs"), mesh, "output")
        return cls(
            fingerprint=read.text("fingerprint"),
            cluster=cluster,
            mesh=mesh,
            operators=plan_json.operators_from_json(read.of("operators"), mesh),
            inputs=inputs,
            outputs=outputs,
            input_names=input_names,
            output_names=output_names,
            collectives=tuple(
                plan_json.collective_from_json(entry, f"collectives[{i}]")
                for i, entry in enumerate(read.list("collectives"))
            ),
            seconds={k: plan_json.as_float(v, f"seconds.{k}") for k, v in read.object("seconds").items()},
            nbytes={k: plan_json.as_int(v, f"nbytes.{k}") for k, v in read.object("nbytes").items()},
            solution=plan_json.solution_from_json(read.of("solution")),
            replicated=tuple(plan_json.as_text(v, f"replicated[{i}]") for i, v in enumerate(read.list("replicated"))),
            microbatches=plan_json.as_int(read.of("microbatches"), "microbatches"),
            input_types=input_types,
            output_types=output_types,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan; a reader sees the old file or the whole new one. Raises PlanningError where it cannot."""
        target = Path(path)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            part.write_text(plan_json.text(self.to_json()), encoding="utf-8")
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise PlanningError(f"{target}: the plan cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The plan in a file. Raises PlanningError, with the place, for a file that holds none."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanningError(f"{path}: the plan cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanningError(f"{path}: this is not JSON: {error}") from error
        try:
            return cls.from_json(data)
        except PlanningError as error:
            raise type(error)(f"{path}: {error}") from error


_Shape = tuple[tuple[Factor, ...], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
"""What the legal placements of a rule depend on."""


def _placements(rule: ShardingRule, mesh: Mesh) -> frozenset[Placement]:
    return frozenset(
        Placement(
            operands=tuple(rule.operand_spec(i, assignment) for i in range(len(rule.operands))),
            results=tuple(rule.result_spec(i, assignment) for i in range(len(rule.results))),
        )
        for assignment in rule.assignments(mesh)
    )


def _distance(a: Placement, b: Placement) -> int:
    """How many operands and results differ."""
    return sum(x != y for x, y in zip((*a.operands, *a.results), (*b.operands, *b.results), strict=True))


def _verify_spec(spec: ShardingSpec, type: TensorType, mesh: Mesh, where: str) -> None:
    used = [axis for axes in (*spec.dims, spec.partial) for axis in axes]
    if len(spec.dims) != type.rank:
        raise PlanMismatchError(f"{where}: {spec} has {len(spec.dims)} dimensions, {type} has {type.rank}")
    if unknown := set(used) - set(mesh.axes):
        raise PlanMismatchError(f"{where}: {spec} uses axis {min(unknown)!r}, which mesh {mesh} lacks")
    if twice := [axis for axis in used if used.count(axis) > 1]:
        raise PlanMismatchError(f"{where}: {spec} uses axis {twice[0]!r} twice")
    for dimension, (size, axes) in enumerate(zip(type.shape, spec.dims, strict=True)):
        parts = 1
        for axis in axes:
            parts *= mesh.axis_size(axis)
        if size % parts:
            raise PlanMismatchError(
                f"{where}: {spec} cuts dimension {dimension} of {type}, of size {size}, by {'+'.join(axes)} in {parts} "
                f"parts, which do not divide it"
            )
