"""Seconds and bytes of operators under a sharding: a roofline of flops and bytes over the time of a launch.

Reference: Williams, Waterman and Patterson, "Roofline" (CACM 2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from passes.cluster import Mesh
from passes.rules import Assignment, ShardingRule


def local_flops(rule: ShardingRule, assignment: Assignment, mesh: Mesh) -> float:
    """The flops of one device; only factors on a dimension divide the work.

    Where small products were seen to be slow, flops count for as many as a large product has in the same time.
    """
    parts = dict[int, int]()
    for axis, factor in assignment:
        if rule.factors[factor].size:
            parts[factor] = parts.get(factor, 1) * mesh.axis_size(axis)
    flops = rule.flops / math.prod(parts.values())
    if not is_slowed(rule, mesh):
        return flops
    half = mesh.cluster.group().device.half_extent
    return flops * math.prod(1 + half / extent for extent in extents(rule, parts))


def is_slowed(rule: ShardingRule, mesh: Mesh) -> bool:
    """Whether an operator is a product on a device that is slow at small ones."""
    return bool(mesh.cluster.group().device.half_extent and not rule.light and rule.flops and len(rule.operands) == 2)


def extents(rule: ShardingRule, parts: Mapping[int, int]) -> tuple[float, float, float]:
    """The rows, columns and inner dimension of one device's product of two operands, shared batch dimensions left out.

    A convolution's channels are columns and inner dimension; all that it multiplies beside its named dimensions, the
    positions and the window, counts as rows.
    """
    lhs, rhs, out = (
        {f for f in dims if f >= 0 and rule.factors[f].size}
        for dims in (rule.operands[0], rule.operands[1], rule.results[0])
    )

    def extent(factors: set[int]) -> float:
        return math.prod(rule.factors[f].size / parts.get(f, 1) for f in factors)

    named = math.prod(rule.factors[f].size for f in lhs | rhs | out)
    rows = extent((lhs & out) - rhs) * max(rule.flops / (2 * named), 1.0)
    return rows, extent((rhs & out) - lhs), extent((lhs & rhs) - out)
