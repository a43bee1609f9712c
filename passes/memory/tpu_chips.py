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
