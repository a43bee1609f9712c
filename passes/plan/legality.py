"""Checks that placements fit the types they place, and that each operator's is one that its rule allows.

A saved plan can be edited by hand, so every error says which placement is wrong, and what would be legal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from passes.cluster import Mesh
from passes.errors import PlanMismatchError, explain
from passes.ir import Control, Graph, Node, TensorType, control_of
from passes.placement import Placement, is_free
from passes.plan.parts import Operator
from passes.plan.text import placement_text
from passes.rules import ShardingRule, canonical, rule_of
from passes.sharding import ShardingSpec
from passes.text import quantities

_Use = tuple[str, str, tuple[TensorType, ...], tuple[TensorType, ...], Placement]
"""All that decides whether a node without bodies is placed legally."""


def verify_values(
    kind: str, specs: Sequence[ShardingSpec], names: Sequence[str], values: Sequence[int], graph: Graph, mesh: Mesh
) -> None:
    """Raises PlanMismatchError unless every input or output (`kind`) has a spec that fits its type and is not
    partial.
    """
    if len(specs) != len(values):
        raise PlanMismatchError(f"the plan places {quantities.count(len(specs), kind)}, the function has {len(values)}")
    for i, (spec, value) in enumerate(zip(specs, values, strict=True)):
        where = f"{kind} {names[i] if i < len(names) else i}"
        _verify_spec(spec, graph.types[value], mesh, where)
        if spec.partial:
            raise PlanMismatchError(f"{where}: {spec} is partial; what enters and leaves the function must be whole")


def verify_operators(operators: Sequence[Operator], graph: Graph, mesh: Mesh, within: str = "") -> None:
    """Raises PlanMismatchError unless every operator's placement follows from some assignment of mesh axes by its rule.

    Free operators may have any placement, aliases any that fits their results; loops and branches must have each port
    in one placement. Of equal operators, one is checked.
    """
    if len(operators) != len(graph.nodes):
        raise PlanMismatchError(
            f"{within or 'the plan '}places {quantities.count(len(operators), 'operator')}, the function has "
            f"{len(graph.nodes)}"
        )
    checked: set[_Use] = set()
    for index, (operator, node) in enumerate(zip(operators, graph.nodes, strict=True)):
        use = _use(node, operator.placement, graph)
        if node.primitive == operator.primitive and use in checked:
            continue
        where = f"{within}operator {index} ({operator.primitive}{f' at {operator.source}' if operator.source else ''})"
        if node.primitive != operator.primitive:
            raise PlanMismatchError(f"{where} is {node.primitive} in the function")
        if is_free(graph, index):
            continue
        rule = rule_of(node, graph)
        _verify_side("operand", operator.placement.operands, node.inputs, graph, mesh, where)
        _verify_side("result", operator.placement.results, node.outputs, graph, mesh, where)
        if rule.alias:
            _verify_alias(operator.placement, where)
            continue
        if control := control_of(node, graph):
            _verify_control(operator, control, mesh, where)
            continue
        if not is_legal(operator.placement, rule, mesh):
            legal = placements(rule, mesh)
            if operator.placement not in legal:
                raise _illegal(operator.placement, legal, mesh, where)
        checked.add(use)


def _verify_alias(placement: Placement, where: str) -> None:
    """Raises PlanMismatchError unless a result that is passed through has the placement of its operand."""
    for i, (before, after) in enumerate(zip(placement.operands, placement.results, strict=True)):
        if before != after:
            raise PlanMismatchError(
                f"{where}: operand {i} is placed {before} and leaves as {after}; a barrier moves nothing"
            )


def _use(node: Node, placement: Placement, graph: Graph) -> _Use:
    types = graph.types
    operands, results = tuple(types[v] for v in node.inputs), tuple(types[v] for v in node.outputs)
    return node.primitive, repr(sorted(node.params.items())), operands, results, placement


def _verify_control(operator: Operator, control: Control, mesh: Mesh, where: str) -> None:
    """Raises PlanMismatchError unless every port has one placement that fits, and the bodies are legal inside."""
    if len(operator.placement.bodies) != len(control.bodies):
        bodies = quantities.count(len(control.bodies), "body", "bodies")
        raise PlanMismatchError(f"{where} has {bodies}, the plan places {len(operator.placement.bodies)}")
    spec_of_port: dict[int, ShardingSpec] = {}

    def hold(port: int, spec: ShardingSpec, role: str) -> None:
        if spec_of_port.setdefault(port, spec) != spec:
            raise PlanMismatchError(
                f"{where}: {role} is placed {spec} and elsewhere {spec_of_port[port]}; a value that a loop or branch "
                "holds has one placement, where it enters, in every body and where it leaves"
            )

    sides = ((operator.placement.operands, control.operands), (operator.placement.results, control.results))
    for side, (specs, port_uses) in zip(("operand", "result"), sides, strict=True):
        for i, (spec, port_use) in enumerate(zip(specs, port_uses, strict=True)):
            if port_use.stacked and spec.dims[0]:
                raise PlanMismatchError(
                    f"{where}: {side} {i} is placed {spec}; the dimension that it loops over is whole"
                )
            hold(port_use.port, replace(spec, dims=spec.dims[1:]) if port_use.stacked else spec, f"{side} {i}")
    placed = zip(control.bodies, operator.placement.bodies, operator.bodies, strict=True)
    for number, (body, layout, inside) in enumerate(placed):
        for side, specs, ports in (("input", layout.inputs, body.inputs), ("output", layout.outputs, body.outputs)):
            if len(specs) != len(ports):
                raise PlanMismatchError(
                    f"{where}, body {number}, has {len(ports)} {side}s, the plan places {len(specs)}"
                )
            for i, (spec, port) in enumerate(zip(specs, ports, strict=True)):
                hold(port, spec, f"{side} {i} of body {number}")
        for value, spec in zip(body.graph.inputs, layout.inputs, strict=True):
            _verify_spec(spec, body.graph.types[value], mesh, f"{where}, body {number}")
        verify_operators(inside, body.graph, mesh, f"{where}, body {number}: ")


def placements(rule: ShardingRule, mesh: Mesh) -> frozenset[Placement]:
    """Every placement that follows from some assignment of mesh axes to factors."""
    return frozenset(Placement.of(rule, assignment) for assignment in rule.assignments(mesh))


def is_legal(placement: Placement, rule: ShardingRule, mesh: Mesh) -> bool:
    """Whether `placements(rule, mesh)` has this one, decided without listing them.

    Where users pinned the specs, False may be wrong.
    """
    everywhere = (*rule.operands, *rule.results)
    shown = {factor for factors in everywhere for factor in factors}
    hidden = (None, *(f for f in range(len(rule.factors)) if f not in shown))
    cut: dict[str, set[int]] = {axis: set() for axis in mesh.axes}
    for factors, spec in zip(everywhere, (*placement.operands, *placement.results), strict=True):
        for factor, axes in zip(factors, spec.dims, strict=True):
            for axis in axes:
                cut[axis].add(factor)
    for order in itertools.permutations(mesh.axes):
        for picks in itertools.product(*(cut[axis] or hidden for axis in order)):
            pairs = tuple((axis, f) for axis, f in zip(order, picks, strict=True) if f is not None)
            assignment = canonical(pairs, mesh)
            if min((f for _, f in pairs), default=0) < 0 or not rule.allows(assignment, mesh):
                continue
            if rule.fulfils(assignment, mesh) and Placement.of(rule, assignment) == placement:
                return True
    return False


def _illegal(placement: Placement, legal: frozenset[Placement], mesh: Mesh, where: str) -> PlanMismatchError:
    if not legal:
        return PlanMismatchError(f"{where}: mesh {mesh} has no axes for the cut that the function asks for")

    def distance(candidate: Placement) -> tuple[int, str]:
        pairs = zip((*candidate.operands, *candidate.results), (*placement.operands, *placement.results), strict=True)
        return sum(a != b for a, b in pairs), placement_text(candidate)

    nearest = placement_text(min(legal, key=distance))
    return PlanMismatchError(
        f"{where}: no cut of this operator gives {placement_text(placement)}; the nearest of "
        f"{quantities.count(len(legal), 'legal placement')} on mesh {mesh} is {nearest}"
    )


def _verify_side(
    side: str, specs: Sequence[ShardingSpec], values: Sequence[int], graph: Graph, mesh: Mesh, where: str
) -> None:
    if len(specs) != len(values):
        raise PlanMismatchError(f"{where} has {quantities.count(len(values), side)}, the plan places {len(specs)}")
    for i, (spec, value) in enumerate(zip(specs, values, strict=True)):
        _verify_spec(spec, graph.types[value], mesh, f"{where}, {side} {i}")


def _verify_spec(spec: ShardingSpec, type: TensorType, mesh: Mesh, where: str) -> None:
    used = [axis for axes in (*spec.dims, spec.partial) for axis in axes]
    if len(spec.dims) != type.rank:
        raise PlanMismatchError(
            f"{where}: {spec} has {quantities.count(len(spec.dims), 'dimension')}, {type} {type.rank}"
        )
    for axis in used:
        if axis not in mesh.axes:
            raise PlanMismatchError(f"{where}: {spec} uses axis {axis!r}, which mesh {mesh} lacks")
        if used.count(axis) > 1:
            raise PlanMismatchError(f"{where}: {spec} uses axis {axis!r} twice")
    for dimension, (size, axes) in enumerate(zip(type.shape, spec.dims, strict=True)):
        parts = math.prod(mesh.axis_size(axis) for axis in axes)
        if size % parts:
            raise PlanMismatchError(
                f"{where}: {spec} cuts dimension {dimension} of {type} over {'+'.join(axes)}, {parts} devices, "
                f"which do not divide {size}"
            )


def of_another_program(
    fingerprint: str, n_operators: int, graph: Graph, names: Sequence[str], types: Sequence[TensorType]
) -> PlanMismatchError:
    """The error for a plan that was made for another program than `graph`, with inputs of these names and types."""
    return PlanMismatchError(
        explain(
            f"plan {fingerprint} of {n_operators} operators and {len(names)} inputs",
            f"this function traces to program {graph.fingerprint} of {len(graph.nodes)} operators and "
            f"{len(graph.inputs)} inputs, and a plan belongs to one function with its shapes and dtypes",
            first_difference(graph, names, types),
            "plan again, or call the function with the arguments that the plan was made for",
        )
    )


def first_difference(graph: Graph, names: Sequence[str], types: Sequence[TensorType]) -> str:
    """The first input whose name or type differs from the plan's, as text; empty if all agree."""
    theirs = zip(graph.input_names, (graph.types[v] for v in graph.inputs), strict=False)
    for (name, type), planned_name, planned in zip(theirs, names, types, strict=False):
        if (name, type) != (planned_name, planned):
            return f"the first input that differs is {name} {type}; the plan has {planned_name} {planned}"
    return ""
