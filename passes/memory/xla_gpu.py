"""XLA's GPU compiler: matrices read by rows or by columns, small products in parts, collectives combined up to a size,
and gradients of weights computed behind the collectives that they do not have to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from passes.memory import xla
from passes.memory.gpu_collectives import combined
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_layouts import viewed
from passes.memory.holders import Temporaries
from passes.memory.operations import Operation
from passes.memory.overlap import schedule
from passes.memory.reassociation import reassociated
from passes.memory.split_products import Weights, split


@cache
def model(weights: Weights) -> Callable[..., Temporaries]:
    """The model of the compiler for a GPU of these weights."""
    order = partial(schedule, in_time=weights.in_time)
    compiler = xla.Compiler(combine=partial(_combined, weights=weights), fuse=fuse, schedule=order, settles=True)
    return partial(xla.temporaries, compiler)


def _combined(
    operations: Sequence[Operation], outputs: Sequence[int], weights: Weights
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with transposes for products as views, products split and collectives combined.

    A scatter is fused with what it reads, and then makes a new array, as a sum does: it is not in place any more. The
    maximum of a window is a sum, too: what counts its places is computed in the kernel that compares.
    """
    sums = [(o.kind, o.name[:7]) in (("update", "scatter"), ("opaque", "window")) for o in operations]
    fused = [o._replace(kind="reduce") if s else o for o, s in zip(operations, sums, strict=True)]
    summed, at = reassociated(fused, outputs)
    changed, place = split(viewed(summed), weights)
    joined, moved = combined(changed, [place[at[o]] for o in outputs])
    return joined, tuple(moved[place[p]] for p in at)
