"""XLA's TPU compiler: kernels in the order in which least is live, arrays in tiles, and what there is room for on the
chip.

Of what latency hiding changes of that order only gathers are followed (passes/memory/tpu_schedules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType

from passes.cluster import DeviceSpec
from passes.memory import tpu_layouts, xla
from passes.memory.all_reduces import combined
from passes.memory.holders import Temporaries
from passes.memory.on_chip import Chip
from passes.memory.operations import Operation
from passes.memory.packing import gaps_as_they_come
from passes.memory.tpu_batches import batches
from passes.memory.tpu_chips import room_nbytes, slice_tables
from passes.memory.tpu_collectives import is_summed
from passes.memory.tpu_copies import copied
from passes.memory.tpu_costs import cost_on
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_images import images
from passes.memory.tpu_products import passed_rounded, sent_rounded
from passes.memory.tpu_schedules import Hiding, schedule
from passes.memory.tpu_sums import joined
from passes.memory.tpu_tables import TABLE_NBYTES, tables
from passes.memory.two_cores import beside_chip

SPLIT = frozenset({"tpu-v5p"})
"""TPUs whose two cores share every kernel (passes/memory/two_cores.py). An array that is read in a narrower dtype more
than once is then written in it. (Of TPU v4 libtpu's topologies name each core apart, so nothing is known of both.)"""

HIDING: Mapping[str, float] = MappingProxyType({"tpu-v5e": 200e9})
"""The bytes a second that gathers make while kernels run, of TPUs whose compiler runs them so: all that the links of a
v5e chip carry (1,600 Gbit/s, by Google Cloud's documentation). libtpu 0.0.42 makes many gathers asynchronous on v5e,
and none of 741 for v6e. (On v5p small steps are worse predicted so.)

The scheduler itself reckons with 90e9 along whichever axes, two links of 45e9: compiled for v5e, gathers of 8, 16, 32
and 64 MiB wait for 2, 4, 8 and 16 products of 47 us. But it also takes products that read the memory beside the chip
for up to 1.8 times as long as `cost_on` does. With 90e9 alone GPT under Megatron is 3 % too low, not 11, and a mixture
of experts under ZeRO-3 20 % too high and a Wide-ResNet under Megatron 24: one row more is out of bounds."""

SPLIT_ALIGNMENT = 16 * 2**10
"""Bytes of which every place in the memory of such a TPU is a multiple, by offsets that libtpu 0.0.42 writes with
`xla_dump_to`."""


def _rewritten(
    operations: Sequence[Operation], outputs: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with what is gathered rounded before that, with copies to other layouts, and with all-reduces
    combined.
    """
    place: Sequence[int] = range(len(operations))
    for step in (sent_rounded, passed_rounded, copied, combined, images, batches):
        operations, moved = step(operations, [place[o] for o in outputs])
        place = [moved[p] for p in place]
    return tuple(operations), tuple(place)


def _hiding(device: DeviceSpec) -> Hiding | None:
    """The way in which a TPU's compiler hides gathers, None for one that does not."""
    rate = HIDING.get(device.name)
    return Hiding(cost_on(device), rate) if rate else None


@cache
def model(device: DeviceSpec) -> Callable[..., Temporaries]:
    """The model of the compiler for a TPU."""
    split = device.name in SPLIT
    compiler = xla.Compiler(
        rewrite=_rewritten,
        fuse=partial(fuse, narrowed=split),
        schedule=partial(schedule, hiding=_hiding(device)),
        stored=tpu_layouts.stored,
        chip=Chip(
            room_nbytes=room_nbytes(device),
            bytes_per_second=device.memory_bytes_per_second,
            cost_of=cost_on(device),
            tables_of=partial(slice_tables, device),
        ),
        gaps=gaps_as_they_come,
        alignment=SPLIT_ALIGNMENT if split else tpu_layouts.ALIGNMENT,
        beside=beside_chip if split else None,
        tables=tables,
        table_nbytes=TABLE_NBYTES,
        summed=is_summed,
        joined=joined,
    )
    return partial(xla.temporaries, compiler)
