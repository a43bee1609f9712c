"""The TPUs whose compiler is known here, and the memory that their chips have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from passes.cluster import DeviceSpec

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

KERNELS_NBYTES: Mapping[str, int] = MappingProxyType({"tpu-v6e": 32 * 2**20})
"""The bytes of that memory which the compiler leaves to kernels: of what libtpu 0.0.42 allocates there, no step takes
more than the rest, and large ones take it all (117,440,512 bytes on v5e, up to 100,595,712 on v6e)."""

OTHER_KERNELS_NBYTES = 16 * 2**20
"""Those of other TPUs, of which v5e was measured, as above."""


def room_nbytes(device: DeviceSpec) -> int:
    """The bytes on a TPU's chip in which arrays are kept."""
    return max(0, ON_CHIP_NBYTES[device.name] - KERNELS_NBYTES.get(device.name, OTHER_KERNELS_NBYTES))


def is_tpu(device: DeviceSpec) -> bool:
    """Whether a device is a TPU that this model knows."""
    return device.name in ON_CHIP_NBYTES


SLICES: Mapping[str, int] = MappingProxyType({"tpu-v5e": 4})
"""The slices in which a TPU fetches an array of at least `SLICED_NBYTES`: of hundreds that libtpu 0.0.42 fetches on v5e
all but those of odd shapes have as many. On v5p it cuts none."""

SLICED_NBYTES = 2**20
"""The bytes from which that is so there: none that is smaller was."""

SLICE_NBYTES: Mapping[str, int] = MappingProxyType({"tpu-v6e": 4 * 2**20})
"""The bytes of a slice where they are cut so: on v6e an array of 23 MB has six and one of 67 MB sixteen."""


SLICE_TABLES = 2
"""The tables of a slice that is fetched, for its start and its end, by the offsets that libtpu 0.0.42 writes with
`xla_dump_to`: 2440 of 1220 slices in a T5 on v5e, 188 of 94 in a LLaMA on v6e."""


def slice_tables(device: DeviceSpec, nbytes: int) -> int:
    """The number of tables of the slices in which so many bytes are fetched, 0 for one copy of all."""
    if cut := SLICE_NBYTES.get(device.name):
        slices = -(-nbytes // cut) if nbytes > cut else 0
    else:
        slices = SLICES.get(device.name, 0) if nbytes >= SLICED_NBYTES else 0
    return SLICE_TABLES * slices
