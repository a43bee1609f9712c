"""Whether placements are possible: they fit the types they place, and each operator's is one that its rule allows.

A saved plan can be edited by hand, so every complaint says which placement, and what would be legal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes import quantities
from passes.errors import PlanMismatchError
from passes.ir import Graph, TensorType
from passes.mesh import Mesh
from passes.moves import Placement, is_free
from passes.plan_parts import Operator
from passes.plan_text import placement_text
from passes.rules import Factor, ShardingRule, rule_of
from passes.sharding import ShardingSpec

_Shape = tuple[tuple[Factor, ...], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
"""What the legal placements of a rule depend on: its factors, and where operands and results have them."""


def verify_values(
    kind: str, specs: Sequence[ShardingSpec], names: Sequence[str], values: Sequence[int], graph: Graph, mesh: Mesh
) -> None:
    """Raises PlanMismatchError unless every input or output (`kind`) has a spec that fits and is not partial."""
    if len(specs) != len(values):
        raise PlanMismatchError(f"the plan places {quantities.count(len(specs), kind)}, the function has {len(values)}")
    for i, (spec, value) in enumerate(zip(specs, values, strict=True)):
        where = f"{kind} {names[i] if i < len(names) else i}"
        _verify_spec(spec, graph.types[value], mesh, where)
        if spec.partial:
            raise PlanMismatchError(f"{where}: {spec} is partial; what enters and leaves the function must be whole")


def verify_operators(operators: Sequence[Operator], graph: Graph, mesh: Mesh) -> None:
    """Raises PlanMismatchError unless every operator is placed as some assignment of mesh axes by its rule places it.

    Free operators may be placed in any way, aliases in any way that fits their results.
    """
    if len(operators) != len(graph.nodes):
        raise PlanMismatchError(
            f"the plan places {quantities.count(len(operators), 'operator')}, the function has {len(graph.nodes)}"
        )
    legal: dict[_Shape, frozenset[Placement]] = {}
    for index, (operator, node) in enumerate(zip(operators, graph.nodes, strict=True)):
        where = f"operator {index} ({operator.primitive}{f' at {operator.source}' if operator.source else ''})"
        if node.primitive != operator.primitive:
            raise PlanMismatchError(f"{where} is {node.primitive} in the function")
        if is_free(graph, index):
            continue
        rule = rule_of(node, graph)
        if not rule.alias:
            _verify_side("operand", operator.placement.operands, node.inputs, graph, mesh, where)
        _verify_side("result", operator.placement.results, node.outputs, graph, mesh, where)
        if rule.alias:
            continue
        shape = (rule.factors, rule.operands, rule.results)
        if shape not in legal:
            legal[shape] = placements(rule, mesh)
        if operator.placement not in legal[shape]:
            raise _illegal(operator.placement, legal[shape], mesh, where)


def placements(rule: ShardingRule, mesh: Mesh) -> frozenset[Placement]:
    """Every placement that some assignment of mesh axes to factors gives."""
    return frozenset(
        Placement(
            operands=tuple(rule.operand_spec(i, assignment) for i in range(len(rule.operands))),
            results=tuple(rule.result_spec(i, assignment) for i in range(len(rule.results))),
        )
        for assignment in rule.assignments(mesh)
    )


def _illegal(placement: Placement, legal: frozenset[Placement], mesh: Mesh, where: str) -> PlanMismatchError:
    def distance(other: Placement) -> tuple[int, str]:
        pairs = zip((*other.operands, *other.results), (*placement.operands, *placement.results), strict=True)
        return sum(a != b for a, b in pairs), placement_text(other)

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
