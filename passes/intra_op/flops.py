"""The flops of a step's matrix products: as the model asks for them, and as a plan gives them to one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.cluster import DeviceSpec, Mesh
from passes.intra_op.roofline import computed_flops
from passes.ir import Graph, item_nbytes
from passes.placement import Grouping, Placement, products
from passes.rules import ShardingRule


def model_flops(graph: Graph) -> dict[str, float]:
    """Flops of the matrix products and convolutions of one step on all devices, by the dtype of what is multiplied.

    A multiply-add counts as two; recomputation counts once, attention in full whatever its mask, a branch by its share
    of the runs, and a loop of unknown length once.

    Reference: Chowdhery et al., "PaLM" (2022), appendix B; Korthikanti et al., "Reducing Activation Recomputation in
    Large Transformer Models" (2022), section 6: model flops, as against hardware flops.
    """
    return products(graph, with_recomputed=False)


def product_flops(grouping: Grouping, placements: Sequence[Placement], mesh: Mesh) -> float:
    """Flops of the matrix products and convolutions of one step, as its HLO has them: not those inside of a kernel of
    attention; a loop of unknown length and each branch count once.
    """
    total = 0.0
    for index, (rule, placement) in enumerate(zip(grouping.rules, placements, strict=True)):
        if index in grouping.controls:
            bodies = zip(grouping.controls[index].bodies, grouping.bodies[index], placement.bodies, strict=True)
            for body, inner, layout in bodies:
                total += max(body.trips, 1) * product_flops(inner, layout.placements, mesh)
        elif rule.is_product:
            total += computed_flops(rule, mesh.cluster.group().device) / _parts(rule, placement, mesh)
    return total


_AS_FAST = 0.8
"""The share of another dtype's rate from which a dtype counts as equally fast: measured rates of one product differ by
as much (`python -m autopar measure`, twice).
"""


def slow_dtype(graph: Graph, device: DeviceSpec) -> tuple[str, float, str, float] | None:
    """(slow dtype, its flops a second, a faster dtype, its flops a second) where the device has no units for most
    products.

    The faster dtype is the fastest that is no wider. None where the device has units for every product's dtype, or is
    about as fast.
    """
    work = products(graph)
    rates = device.flops_per_second
    missing = {dtype: flops for dtype, flops in work.items() if dtype not in rates and "float" in dtype}
    if not missing:
        return None
    dtype = max(missing, key=lambda name: missing[name])
    narrow = [name for name in rates if item_nbytes(name) <= item_nbytes(dtype)]
    best = max(narrow, key=lambda name: rates[name], default=dtype)
    slow, fast = (device.matmul_flops_per_second(name) for name in (dtype, best))
    return (dtype, slow, best, fast) if slow < _AS_FAST * fast else None


def _parts(rule: ShardingRule, placement: Placement, mesh: Mesh) -> int:
    """The number of equal parts into which a placement cuts the work."""
    cut: dict[int, int] = {}
    everywhere = zip((*rule.operands, *rule.results), (*placement.operands, *placement.results), strict=True)
    for factors, spec in everywhere:
        for factor, axes in zip(factors, spec.dims, strict=True):
            if factor >= 0 and rule.factors[factor].size:
                cut[factor] = math.prod(mesh.axis_size(axis) for axis in axes)
    return math.prod(cut.values())
