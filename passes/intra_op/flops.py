"""The work that a plan gives one device: flops of its products, each on the parts of the operands that are there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.cluster import Mesh
from passes.ir import Graph
from passes.placement import Grouping, Placement
from passes.rules import ShardingRule


def product_flops(graph: Graph, grouping: Grouping, placements: Sequence[Placement], mesh: Mesh) -> float:
    """Flops of one step's matrix products and convolutions; a loop of unknown length and each branch count once."""
    total = 0.0
    for index, (rule, placement) in enumerate(zip(grouping.rules, placements, strict=True)):
        if index in grouping.controls:
            bodies = zip(grouping.controls[index].bodies, grouping.bodies[index], placement.bodies, strict=True)
            for body, inner, layout in bodies:
                total += max(body.trips, 1) * product_flops(body.graph, inner, layout.placements, mesh)
        elif rule.is_product:
            total += rule.flops / _parts(rule, placement, mesh)
    return total


def _parts(rule: ShardingRule, placement: Placement, mesh: Mesh) -> int:
    """Into how many equal parts a placement cuts the work."""
    cut: dict[int, int] = {}
    everywhere = zip((*rule.operands, *rule.results), (*placement.operands, *placement.results), strict=True)
    for factors, spec in everywhere:
        for factor, axes in zip(factors, spec.dims, strict=True):
            if factor >= 0 and rule.factors[factor].size:
                cut[factor] = math.prod(mesh.axis_size(axis) for axis in axes)
    return math.prod(cut.values())
