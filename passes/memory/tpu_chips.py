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


def is_tpu(device: DeviceSpec) -> bool:
    """Whether a device is a TPU that this model knows."""
    return device.name in ON_CHIP_NBYTES
