"""Seconds of computing under any layout, such as that of an edited plan, by the roofline that prices strategies.

`passes/intra_op/strategies.py` prices every way of a bundle before there is a layout; here are the placements, as an
edited plan has them, and what each bundle reads, writes and multiplies follows from those.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.cluster import Mesh
from passes.intra_op.build_problem import remade, visible
from passes.intra_op.roofline import local_flops
from passes.ir import Graph, Phase
from passes.placement import Bundle, Grouping, Layout, Placement
from passes.rules import Assignment, ShardingRule
from passes.sharding import ShardingSpec


def compute_seconds(
    graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, *, weight: float = 1.0, inside: bool = False
) -> dict[Phase, float]:
    """Seconds of all operators by phase, reshardings apart; `inside` a loop or branch, `weight` times a step."""
    totals: dict[Phase, float] = {}
    anew = remade(graph, grouping)
    written = visible(graph, grouping) - anew
    for bundle in grouping.bundles:
        when: Phase = "backward" if bundle.phase == "apply" and inside else bundle.phase
        spent = _bundle_seconds(graph, grouping, mesh, layout.placements, bundle, written, anew)
        totals[when] = totals.get(when, 0.0) + weight * spent
    for index, control in grouping.controls.items():
        bodies = zip(control.bodies, grouping.bodies[index], layout.placements[index].bodies, strict=True)
        for body, within, placed in bodies:
            runs = weight * max(body.trips, 1) * body.share
            for when, spent in compute_seconds(body.graph, within, mesh, placed, weight=runs, inside=True).items():
                totals[when] = totals.get(when, 0.0) + spent
    return totals


def _bundle_seconds(
    graph: Graph,
    grouping: Grouping,
    mesh: Mesh,
    placements: Sequence[Placement],
    bundle: Bundle,
    written: frozenset[int],
    anew: frozenset[int],
) -> float:
    """The larger of compute and memory time of a bundle's members together, plus one launch.

    Values `anew` are made by whoever reads them, and pass no memory.
    """
    device = mesh.cluster.group().device
    members = sorted(bundle.members)
    produced = {value for member in members for value in graph.nodes[member].outputs}
    specs: dict[int, ShardingSpec] = {}
    flops = nbytes = 0.0
    for member in members:
        node, rule, placement = graph.nodes[member], grouping.rules[member], placements[member]
        flops += local_flops(rule, _assignment(rule, placement), mesh)
        for position, (value, spec) in enumerate(zip(node.inputs, placement.operands, strict=True)):
            if value in graph.literals or value in grouping.free:
                continue
            if value in produced or value in specs:
                if specs[value].partial and not spec.partial:
                    specs[value] = spec  # reduced inside, for all that come after
                continue
            if value in bundle.inputs:
                specs[value] = spec
            read = spec.local_nbytes(graph.types[value], mesh)
            if position in rule.sparse:
                result = graph.types[node.outputs[0]]
                nbytes_read = min(graph.types[value].nbytes, result.nbytes)
                read = nbytes_read * placement.results[0].local_nbytes(result, mesh) / max(result.nbytes, 1)
            nbytes += 0.0 if value in anew else read
        specs.update(zip(node.outputs, placement.results, strict=True))
    nbytes += sum(spec.local_nbytes(graph.types[value], mesh) for value, spec in specs.items() if value in written)
    first = graph.nodes[members[0]]
    dtype = next((graph.types[value].dtype for value in (*first.inputs, *first.outputs)), "float32")
    rate = device.matmul_flops_per_second(dtype)
    return max(flops / rate, nbytes / device.memory_bytes_per_second) + device.launch_seconds


def _assignment(rule: ShardingRule, placement: Placement) -> Assignment:
    """The assignment of a rule that a placement stands for: the factors that each axis cuts."""
    cut_by: dict[tuple[str, int], None] = {}
    for rows, specs in ((rule.operands, placement.operands), (rule.results, placement.results)):
        for factors, spec in zip(rows, specs, strict=True):
            for factor, axes in zip(factors, spec.dims, strict=False):
                cut_by.update(((axis, factor), None) for axis in axes if factor >= 0)
    return tuple(cut_by)
