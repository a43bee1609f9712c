"""XLA's GPU compiler: matrices read by rows or by columns, small products in parts, collectives combined up to a size,
and gradients of weights computed behind the collectives that they do not have to wait for. GPUs before Hopper compute
in float32 what they cannot in bfloat16, and wait for collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType

from passes.memory import xla
from passes.memory.conversions import sliced_first
from passes.memory.gpu_collectives import Fuse, combined
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_layouts import viewed
from passes.memory.gpu_orders import copied
from passes.memory.gpu_scatters import unpadded
from passes.memory.gpu_weights import laid_out
from passes.memory.gpu_widening import widened
from passes.memory.holders import Temporaries
from passes.memory.operations import Operation
from passes.memory.overlap import schedule
from passes.memory.reassociation import reassociated
from passes.memory.split_products import Weights, split

SUMS: Mapping[str, str] = MappingProxyType({"update": "scatter", "opaque": "window"})
"""Kinds of operations that are fused with what they read, as sums are, and what the names of these begin with."""


@cache
def model(weights: Weights) -> Callable[..., Temporaries]:
    """The model of the compiler for a GPU of these weights."""
    order = partial(schedule, hides=weights.from_hopper)
    fusing = partial(fuse, arithmetic=weights.arithmetic)
    combine = partial(_combined, weights=weights, fuse=fusing)
    compiler = xla.Compiler(combine=combine, fuse=fusing, schedule=order, copies_late=True)
    return partial(xla.temporaries, compiler)


def _combined(
    operations: Sequence[Operation], outputs: Sequence[int], weights: Weights, fuse: Fuse
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with transposes for products as views or copies, products split and collectives combined.

    A scatter is fused with what it reads, as a sum is, and written over the array that it adds to. The maximum of a
    window is a sum, too: what counts its places is computed in the kernel that compares. What a GPU has no arithmetic
    for is in float32.
    """
    sums = [o.kind in SUMS and o.name.startswith(SUMS[o.kind]) for o in operations]
    sliced = sliced_first(unpadded(operations), outputs)
    fused = [o._replace(kind="reduce") if s else o for o, s in zip(sliced, sums, strict=True)]
    wide, first = (fused, range(len(fused))) if weights.from_hopper else widened(fused)
    summed, at = reassociated(wide, [first[o] for o in outputs])
    ordered, beside = copied(summed, [at[first[o]] for o in outputs])
    changed, place = split(viewed(laid_out(ordered)), weights)
    joined, moved = combined(changed, [place[beside[at[first[o]]]] for o in outputs], fuse)
    return joined, tuple(moved[place[beside[at[p]]]] for p in first)
