"""XLA's GPU compiler: matrices read by rows or by columns, small products in parts, collectives combined up to a size,
and gradients of weights computed behind the collectives that they do not have to wait for. GPUs before Hopper compute
in float32 what they cannot in bfloat16, and wait for collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType

from passes.memory import xla
from passes.memory.conversions import sliced_first
from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_collectives import with_combined
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_joint_products import joint
from passes.memory.gpu_layouts import viewed
from passes.memory.gpu_orders import copied
from passes.memory.gpu_rooms import at_once
from passes.memory.gpu_scatters import added, unpadded, with_copies
from passes.memory.gpu_sums import in_parts
from passes.memory.gpu_weights import laid_out
from passes.memory.gpu_widening import widened
from passes.memory.holders import Temporaries
from passes.memory.operations import Operation
from passes.memory.overlap import schedule
from passes.memory.reassociation import reassociated
from passes.memory.split_products import Weights, split

SUMS: Mapping[str, str] = MappingProxyType({"update": "scatter", "opaque": "window"})
"""Kinds of operations that are fused with what they read, as sums are, and what the names of these begin with."""

Moved = tuple[Sequence[Operation], Sequence[int]]
"""Operations that were changed, and the new position of each old one."""


@cache
def model(weights: Weights) -> Callable[..., Temporaries]:
    """The model of the compiler for a GPU of these weights."""
    order = partial(schedule, hides=weights.from_hopper)
    compiler = xla.Compiler(
        rewrite=partial(_rewritten, weights=weights),
        fuse=partial(fuse, arithmetic=weights.arithmetic),
        schedule=order,
        copies_late=True,
        over_views=True,
        ends_late=not weights.from_hopper,
        pipelines=True,
        finish=_finished,
    )
    return partial(xla.temporaries, compiler)


def _finished(program: DeviceProgram, kernels: Sequence[Kernel]) -> tuple[DeviceProgram, Sequence[Kernel]]:
    """The program and its kernels with collectives combined, and with copies that scatters write over."""
    return with_copies(*with_combined(program, kernels))


def _rewritten(
    operations: Sequence[Operation], outputs: Sequence[int], weights: Weights
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with transposes for products as views or copies, and products split.

    Rooms of one shape are made at once. A scatter is fused with what it reads, as a sum is, and written over the array
    that it adds to. The maximum of a window is a sum, too: what counts its places is computed in the kernel that
    compares. What a GPU has no arithmetic for is in float32.
    """
    place: Sequence[int] = range(len(operations))
    for step in _steps(weights):
        operations, moved = step(operations, [place[o] for o in outputs])
        place = [moved[p] for p in place]
    return tuple(operations), tuple(place)


def _steps(weights: Weights) -> Iterator[Callable[[Sequence[Operation], list[int]], Moved]]:
    """The changes to the operations of a program, given its outputs."""
    yield lambda operations, outputs: at_once(added(unpadded(operations), outputs))
    yield lambda operations, outputs: (_summed(sliced_first(operations, outputs)), range(len(operations)))
    if not weights.from_hopper:
        yield lambda operations, _: widened(operations)
    yield reassociated
    yield copied
    yield lambda operations, _: joint(operations)
    yield lambda operations, _: split(viewed(laid_out(operations)), weights)
    yield in_parts


def _summed(operations: Sequence[Operation]) -> list[Operation]:
    """The operations with those that are fused as sums are as sums."""
    sums = [o.kind in SUMS and o.name.startswith(SUMS[o.kind]) for o in operations]
    return [o._replace(kind="reduce") if s else o for o, s in zip(operations, sums, strict=True)]
