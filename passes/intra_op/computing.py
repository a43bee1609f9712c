"""Seconds of computing under a given layout, which may be one that no strategy has, such as that of an edited plan.

`passes.intra_op.strategies` counts the flops and bytes of all strategies of an operator group at once, from the sizes
of their pieces; here they are counted for one layout, from its placements. Both turn them into seconds by
`roofline.group_seconds`, and `tests/passes/intra_op/test_assemblies.py` compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.cluster import Mesh
from passes.intra_op.build_problem import remade, visible
from passes.intra_op.rearranging import rearranging_seconds
from passes.intra_op.roofline import computing_dtype, group_seconds, is_no_kernel, local_flops, times_made
from passes.intra_op.stacks import copies
from passes.ir import PHASES, Body, Control, Graph, Node, Phase, phase
from passes.placement import Grouping, Layout, OperatorGroup, Placement, group
from passes.rules import Assignment, ShardingRule
from passes.sharding import ShardingSpec


def compute_seconds(graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout) -> dict[Phase, float]:
    """Seconds of all operators by phase, those in loops and branches included, reshardings apart."""
    totals: dict[Phase, float] = {}
    for when, _, spent in operator_seconds(graph, grouping, mesh, layout):
        totals[when] = totals.get(when, 0.0) + spent
    return totals


def operator_seconds(
    graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, *, weight: float = 1.0, inside: bool = False
) -> Iterator[tuple[Phase, Node, float]]:
    """(phase, heaviest member, seconds a step) of each operator group, those in loops and branches included.

    The groups of a graph that is `inside` a loop or branch run `weight` times a step.
    """
    for when, operator_group, spent in _spent(graph, grouping, mesh, layout, inside=inside):
        yield when, graph.nodes[_heaviest(operator_group, grouping)], weight * spent
    for index, control in grouping.controls.items():
        node, spent = graph.nodes[index], _copying(control, grouping.bodies[index], mesh, layout.placements[index])
        if spent:
            yield phase(node), node, weight * spent
    for body, within, placed in _bodies(grouping, layout):
        runs = weight * body.runs
        yield from operator_seconds(body.graph, within, mesh, placed, weight=runs, inside=True)


def node_seconds(body: Graph, mesh: Mesh, layout: Layout) -> NDArray[np.float64]:
    """Seconds [nodes] of the body of a loop in one trip: of an operator group at its heaviest member, and of a loop
    with all that is in it.
    """
    grouping, seconds = group(body, inside=True), np.zeros(len(body.nodes))
    for _, operator_group, spent in _spent(body, grouping, mesh, layout, inside=True):
        seconds[_heaviest(operator_group, grouping)] += spent
    for index, control in grouping.controls.items():
        placement, groupings = layout.placements[index], grouping.bodies[index]
        seconds[index] += _copying(control, groupings, mesh, placement)
        for inner, within, placed in zip(control.bodies, groupings, placement.bodies, strict=True):
            spent_inside = operator_seconds(inner.graph, within, mesh, placed, weight=inner.runs, inside=True)
            seconds[index] += sum(spent for _, _, spent in spent_inside)
    return seconds


def _heaviest(operator_group: OperatorGroup, grouping: Grouping) -> int:
    """The first product of an operator group, or its first member."""
    members = sorted(operator_group.members)
    return next((member for member in members if grouping.rules[member].is_product), members[0])


def _copying(control: Control, groupings: Sequence[Grouping], mesh: Mesh, placement: Placement) -> float:
    """Seconds in which a loop copies slices out of stacked arrays and into them."""
    specs = dict[int, ShardingSpec]()
    for body, inside in zip(control.bodies, placement.bodies, strict=True):
        specs |= zip((*body.inputs, *body.outputs), (*inside.inputs, *inside.outputs), strict=True)
    return sum(
        copied.seconds(specs[port].local_nbytes(control.ports[port].type, mesh), mesh)
        for port, copied in copies(control, groupings).items()
    )


def weight_gradient_share(graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, sent: Collection[int]) -> float:
    """The share of a backward pass that no other stage waits for: gradients of weights and their sums.

    Whatever a product reads, or is `sent` to another stage, counts as gradients of inputs: attention, norms and
    activations belong to those.

    Reference: Qi et al., "Zero Bubble Pipeline Parallelism" (2024), section 2 and table 6.
    """
    inputs, weights = _halves(graph, grouping, mesh, layout, sent)
    return weights / (inputs + weights) if weights else 0.5


def _halves(graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, sent: Collection[int]) -> tuple[float, float]:
    """The seconds of a backward pass for gradients of inputs, and for those of weights."""
    awaited = set(sent)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if grouping.rules[index].is_product or index in grouping.controls or not awaited.isdisjoint(node.outputs):
            awaited.update(node.inputs)
    totals = [0.0, 0.0]
    for _, operator_group, spent in _spent(graph, grouping, mesh, layout, inside=True, phases=("backward",)):
        made = (value for member in operator_group.members for value in graph.nodes[member].outputs)
        totals[awaited.isdisjoint(made)] += spent
    for body, within, placed in _bodies(grouping, layout):
        carried = set(body.inputs)
        onward = [v for v, port in zip(body.graph.outputs, body.outputs, strict=True) if port in carried]
        halves = _halves(body.graph, within, mesh, placed, onward)
        totals = [t + body.runs * half for t, half in zip(totals, halves, strict=True)]
    return totals[0], totals[1]


def _spent(
    graph: Graph,
    grouping: Grouping,
    mesh: Mesh,
    layout: Layout,
    *,
    inside: bool,
    phases: Collection[Phase] = PHASES,
) -> Iterator[tuple[Phase, OperatorGroup, float]]:
    """(phase, operator group, seconds) of every operator group of a graph in these phases; loops' bodies are
    left out.
    """
    anew = remade(graph, grouping)
    written = visible(graph, grouping) - anew
    priced = _PlacedGraph(
        graph=graph, grouping=grouping, mesh=mesh, placements=layout.placements, written=written, anew=anew
    )
    for operator_group in grouping.operator_groups:
        when: Phase = "backward" if operator_group.phase == "apply" and inside else operator_group.phase
        if when not in phases:
            continue
        yield when, operator_group, priced.seconds(operator_group)


def _bodies(grouping: Grouping, layout: Layout) -> Iterator[tuple[Body, Grouping, Layout]]:
    """The bodies of loops and branches with their groupings and layouts."""
    for index, control in grouping.controls.items():
        yield from zip(control.bodies, grouping.bodies[index], layout.placements[index].bodies, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedGraph:
    """A graph with its placements, and how each value is had: `written` to memory, or made `anew` by each reader."""

    graph: Graph
    grouping: Grouping
    mesh: Mesh
    placements: Sequence[Placement]
    written: frozenset[int]
    anew: frozenset[int]

    def seconds(self, operator_group: OperatorGroup) -> float:
        """Seconds of an operator group, all its members together, by the roofline."""
        graph, device = self.graph, self.mesh.cluster.group().device
        members = sorted(operator_group.members)
        flops = rearranging = 0.0
        for member in members:
            node, rule = graph.nodes[member], self.grouping.rules[member]
            again = times_made([graph.types[v] for v in node.outputs]) if rule.is_product else 1
            assignment = _assignment(rule, self.placements[member])
            flops += again * local_flops(rule, assignment, self.mesh)
            rearranging += rearranging_seconds(rule, [graph.types[v] for v in node.inputs], assignment, self.mesh)
        if is_no_kernel([self.grouping.rules[member] for member in members], device):
            return rearranging
        first = graph.nodes[members[0]]
        dtype = computing_dtype(*([graph.types[value] for value in values] for values in (first.inputs, first.outputs)))
        work = np.array([flops, self._nbytes(operator_group, members), rearranging])
        return float(group_seconds(device, dtype, *work))

    def _nbytes(self, operator_group: OperatorGroup, members: Sequence[int]) -> float:
        """Bytes that an operator group reads and writes: values from outside at each use, its own inputs once."""
        graph = self.graph
        produced = {value for member in members for value in graph.nodes[member].outputs}
        specs: dict[int, ShardingSpec] = {}
        nbytes = 0.0
        for member in members:
            node, placement = graph.nodes[member], self.placements[member]
            for position, (value, spec) in enumerate(zip(node.inputs, placement.operands, strict=True)):
                if value in graph.literals or value in self.grouping.free:
                    continue
                if value in produced or value in specs:
                    if specs[value].partial and not spec.partial:
                        specs[value] = spec  # reduced inside, for all that come after
                    continue
                if value in operator_group.inputs:
                    specs[value] = spec
                nbytes += 0.0 if value in self.anew else self._read_nbytes(member, position)
            specs.update(zip(node.outputs, placement.results, strict=True))
        written = (
            spec.local_nbytes(graph.types[value], self.mesh) for value, spec in specs.items() if value in self.written
        )
        return nbytes + sum(written)

    def _read_nbytes(self, member: int, position: int) -> float:
        """Bytes that a node reads of an operand; of a sparse one (a lookup's table) as many elements as the
        result has.
        """
        node, placement = self.graph.nodes[member], self.placements[member]
        operand = self.graph.types[node.inputs[position]]
        if position not in self.grouping.rules[member].read_in_part:
            return placement.operands[position].local_nbytes(operand, self.mesh)
        result = self.graph.types[node.outputs[0]]
        local_nbytes = placement.results[0].local_nbytes(result, self.mesh)
        return min(operand.nbytes, result.nbytes) * local_nbytes / max(result.nbytes, 1)


def _assignment(rule: ShardingRule, placement: Placement) -> Assignment:
    """The assignment of a rule under which its operands and results have this placement: (axis, factor) pairs."""
    cut_by: dict[tuple[str, int], None] = {}
    for rows, specs in ((rule.operands, placement.operands), (rule.results, placement.results)):
        for factors, spec in zip(rows, specs, strict=True):
            for factor, axes in zip(factors, spec.dims, strict=False):
                cut_by.update(((axis, factor), None) for axis in axes if factor >= 0)
    return tuple(cut_by)
