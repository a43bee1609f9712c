"""XLA's TPU compiler: kernels in the order in which least is live, arrays in tiles, and what there is room for on the
chip.

Of what latency hiding changes of that order nothing is known: where it keeps a layer's products for the collectives of
others, as under tensor parallelism, predictions are up to 27 % too low (docs/limits.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType

from passes.cluster import DeviceSpec
from passes.memory import tpu_layouts, xla
from passes.memory.all_reduces import combined
from passes.memory.holders import Temporaries
from passes.memory.overlap import schedule
from passes.memory.packing import gaps_as_they_come
from passes.memory.tpu_fusion import fuse

ON_CHIP_NBYTES: Mapping[str, int] = MappingProxyType(
    {
        "tpu-v3": 0,
        "tpu-v4": 0,
        "tpu-v5e": 128 * 2**20,
        "tpu-v5p": 64 * 2**20,
        "tpu-v6e": 128 * 2**20,
        "tpu-7x": 64 * 2**20,
    }
)
"""The bytes of vector memory of a core in which the compiler keeps arrays (jax/_src/pallas/mosaic/tpu_info.py)."""

SPLIT = frozenset({"tpu-v5p"})
"""TPUs whose two cores share every kernel: either has half of a result in its own memory, so all results lie beside the
chip, from where they are copied to both. An array that is read in a narrower dtype more than once is then written in
it. (Of TPU v4 libtpu's topologies name each core apart, so nothing is known of both together.)"""

SPLIT_ALIGNMENT = 16 * 2**10
"""Bytes of which every place in the memory of such a TPU is a multiple, the tables of what is copied to its cores
included: one for every argument and every result. (Offsets that libtpu 0.0.42 writes with `xla_dump_to`; peaks of 68
steps err by 11.6 % in the mean: `python -m benchmarks.compilers --targets v5p:2x2x2`.)"""

TEMPORARIES: Mapping[str, float] = MappingProxyType({"tpu-v6e": 0.1})
"""The share of that memory which temporaries fill in the model, `MOST_TEMPORARIES` of TPUs that are not here. The rest
has kernels' own blocks and operands that are fetched ahead of them. Chosen among 0.1, 0.2, 0.3 and 0.4 on 27 steps of
0.2 to 5 GB each: on v6e, 0.4 has 8 peaks out of bounds and errs by 7.5 % in the mean, 0.1 has 4 and errs by 6.4 %; on
v5e, 0.1 has 10 and 10.5 %, 0.4 has 7 and 7.1 % (benchmarks.compilers)."""

MOST_TEMPORARIES = 0.4
"""The share on other TPUs, of which v5e alone was measured, as above."""


def is_tpu(device: DeviceSpec) -> bool:
    """Whether a device is a TPU that this model knows."""
    return device.name in ON_CHIP_NBYTES


@cache
def model(device: str) -> Callable[..., Temporaries]:
    """The model of the compiler for a TPU of this name."""
    split = device in SPLIT
    compiler = xla.Compiler(
        combine=combined,
        fuse=partial(fuse, narrowed=split),
        schedule=partial(schedule, hides=False),
        stored=tpu_layouts.stored,
        on_chip_nbytes=0 if split else int(TEMPORARIES.get(device, MOST_TEMPORARIES) * ON_CHIP_NBYTES[device]),
        gaps=gaps_as_they_come,
        alignment=SPLIT_ALIGNMENT if split else tpu_layouts.ALIGNMENT,
        table_nbytes=SPLIT_ALIGNMENT if split else 0,
    )
    return partial(xla.temporaries, compiler)
