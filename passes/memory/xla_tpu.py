"""XLA's TPU compiler: kernels in the order in which least is live, arrays in tiles, and what there is room for on the
chip.

Of what latency hiding changes of that order nothing is known: where it keeps a layer's products for the collectives of
others, as under tensor parallelism, predictions are up to 27 % too low (docs/limits.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType

from passes.memory import tpu_layouts, xla
from passes.memory.all_reduces import combined
from passes.memory.holders import Temporaries
from passes.memory.operations import Operation
from passes.memory.overlap import schedule
from passes.memory.packing import gaps_as_they_come
from passes.memory.tpu_chips import ON_CHIP_NBYTES
from passes.memory.tpu_collectives import is_summed
from passes.memory.tpu_copies import copied
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_tables import TABLE_NBYTES, tables
from passes.memory.two_cores import beside_chip

SPLIT = frozenset({"tpu-v5p"})
"""TPUs whose two cores share every kernel (passes/memory/two_cores.py). An array that is read in a narrower dtype more
than once is then written in it. (Of TPU v4 libtpu's topologies name each core apart, so nothing is known of both.)"""

SPLIT_ALIGNMENT = 16 * 2**10
"""Bytes of which every place in the memory of such a TPU is a multiple, by offsets that libtpu 0.0.42 writes with
`xla_dump_to`."""

TEMPORARIES: Mapping[str, float] = MappingProxyType({"tpu-v6e": 0.1, "tpu-v5p": 0.2})
"""The share of that memory which temporaries fill in the model, `MOST_TEMPORARIES` of TPUs that are not here. The rest
has kernels' own blocks and operands that are fetched ahead of them. Chosen among 0.1, 0.2, 0.3 and 0.4 (0.3 to 0.6 on
v5e) by the fewest peaks out of bounds: of 26 large steps on v6e, 0.4 has 10 and errs by 7.7 % in the mean, 0.1 has 4
and errs by as much; of 25 on v5e, 0.3 has 4 and 7.4 %, 0.4 has 4 and 6.4 %, 0.5 has 5 and 6.0 %; of 63 steps on v5p,
0.1 has 17 and 7.5 %, 0.2 has 16 and 6.4 %, 0.4 has 17 and 6.2 % (benchmarks.compilers)."""

MOST_TEMPORARIES = 0.4
"""The share on other TPUs, of which v5e alone was measured, as above."""


def _copied_and_combined(
    operations: Sequence[Operation], outputs: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with copies to other layouts, and with all-reduces combined."""
    made, place = copied(operations, outputs)
    joined, again = combined(made)
    return joined, tuple(again[p] for p in place)


@cache
def model(device: str) -> Callable[..., Temporaries]:
    """The model of the compiler for a TPU of this name."""
    split = device in SPLIT
    compiler = xla.Compiler(
        combine=_copied_and_combined if split else combined,
        fuse=partial(fuse, narrowed=split),
        schedule=partial(schedule, hides=False),
        stored=tpu_layouts.stored,
        on_chip_nbytes=int(TEMPORARIES.get(device, MOST_TEMPORARIES) * ON_CHIP_NBYTES[device]),
        gaps=gaps_as_they_come,
        alignment=SPLIT_ALIGNMENT if split else tpu_layouts.ALIGNMENT,
        beside=beside_chip if split else None,
        tables=tables,
        table_nbytes=TABLE_NBYTES,
        summed=is_summed,
    )
    return partial(xla.temporaries, compiler)
