"""The compiler that a device has: XLA's for CPUs, GPUs or TPUs."""

from __future__ import annotations

from passes.cluster import DeviceSpec
from passes.memory.operations import Compiler
from passes.memory.split_products import weights_of
from passes.memory.tpu_chips import is_tpu


def compiler_of(device: DeviceSpec) -> Compiler:
    """The compiler of a device; the CPU's where none is known."""
    if is_tpu(device):
        return "tpu"
    return "cpu" if weights_of(device.name) is None else "gpu"
