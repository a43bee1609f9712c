"""The numbers of GPUs that XLA's GPU compiler asks for, so that it compiles for one that is not here.

Measured by their driver (`measured`): openxla/xla, `xla/backends/gpu/target_config/specs`. From data sheets, and for
the limits of a multiprocessor from the CUDA C++ programming guide, technical specifications by compute capability:
L4 (Ada white paper and L4 data sheet), A10G (A10's, of the same chip), RTX 4090 (Ada white paper), GB300 (B300's and
GB200's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """One GPU as XLA's compiler knows it; `capability` is CUDA's (major, minor), `core` a multiprocessor."""

    description: str
    capability: tuple[int, int]
    cores: int
    memory_nbytes: int
    memory_bytes_per_second: int
    l2_nbytes: int
    clock_ghz: float
    fpus_per_core: int = 128
    threads_per_core: int = 2048
    shared_nbytes_per_core: int = 233472
    shared_nbytes_per_block: int = 232448

    def to_text_proto(self) -> str:
        """The target as XLA's `GpuTargetConfigProto`, in text."""
        major, minor = self.capability
        numbers = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": self.shared_nbytes_per_core,
            "threads_per_core_limit": self.threads_per_core,
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": self.memory_bytes_per_second,
            "l2_cache_size": self.l2_nbytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_nbytes,
            "shared_memory_per_block_optin": self.shared_nbytes_per_block,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
        }
        info = " ".join(f"{name}: {number}" for name, number in numbers.items())
        return (
            f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} '
            f'device_description_str: "{self.description}"'
        )


def _volta(description: str, memory_nbytes: int) -> GpuTarget:
    return GpuTarget(
        description=description,
        capability=(7, 0),
        cores=80,
        memory_nbytes=memory_nbytes,
        memory_bytes_per_second=898_048_000_000,
        l2_nbytes=6291456,
        clock_ghz=1.53,
        fpus_per_core=64,
        shared_nbytes_per_core=98304,
        shared_nbytes_per_block=98304,
    )


def _ampere(description: str, memory_nbytes: int, memory_bytes_per_second: int) -> GpuTarget:
    return GpuTarget(
        description=description,
        capability=(8, 0),
        cores=108,
        memory_nbytes=memory_nbytes,
        memory_bytes_per_second=memory_bytes_per_second,
        l2_nbytes=41943040,
        clock_ghz=1.41,
        fpus_per_core=64,
        shared_nbytes_per_core=167936,
        shared_nbytes_per_block=166912,
    )


def _consumer(
    description: str,
    capability: tuple[int, int],
    cores: int,
    memory_gib: int,
    gb_per_second: int,
    l2_mib: int,
    clock_ghz: float,
) -> GpuTarget:
    return GpuTarget(
        description=description,
        capability=capability,
        cores=cores,
        memory_nbytes=memory_gib * 2**30,
        memory_bytes_per_second=gb_per_second * 10**9,
        l2_nbytes=l2_mib * 2**20,
        clock_ghz=clock_ghz,
        threads_per_core=1536,
        shared_nbytes_per_core=102400,
        shared_nbytes_per_block=101376,
    )


GPU_TARGETS: Mapping[str, GpuTarget] = MappingProxyType(
    {
        "v100-16g": _volta("Tesla V100-SXM2-16GB", 16935682048),
        "v100-32g": _volta("Tesla V100-SXM2-32GB", 32 * 2**30),
        "a100-40g": _ampere("NVIDIA A100-SXM4-40GB", 42331013120, 1_555_200_000_000),
        "a100-80g": _ampere("NVIDIA A100-SXM4-80GB", 85100068864, 2_039_040_000_000),
        "h100": GpuTarget(
            description="NVIDIA H100 80GB HBM3",
            capability=(9, 0),
            cores=132,
            memory_nbytes=84942979072,
            memory_bytes_per_second=3_352_320_000_000,
            l2_nbytes=52428800,
            clock_ghz=1.98,
        ),
        "h200": GpuTarget(
            description="NVIDIA H200",
            capability=(9, 0),
            cores=132,
            memory_nbytes=151397597184,
            memory_bytes_per_second=4_800_000_000_000,
            l2_nbytes=52428800,
            clock_ghz=1.98,
        ),
        "b200": GpuTarget(
            description="NVIDIA B200",
            capability=(10, 0),
            cores=148,
            memory_nbytes=191514411008,
            memory_bytes_per_second=7_672_320_000_000,
            l2_nbytes=132644864,
            clock_ghz=1.965,
        ),
        "gb200": GpuTarget(
            description="NVIDIA GB200",
            capability=(10, 0),
            cores=152,
            memory_nbytes=197897748480,
            memory_bytes_per_second=7_928_064_000_000,
            l2_nbytes=135528448,
            clock_ghz=2.062,
        ),
        "gb300": GpuTarget(
            description="NVIDIA GB300",
            capability=(10, 3),
            cores=152,
            memory_nbytes=277 * 2**30,
            memory_bytes_per_second=8_000_000_000_000,
            l2_nbytes=135528448,
            clock_ghz=2.062,
        ),
        "l4": _consumer("NVIDIA L4", (8, 9), 58, 22, 300, 48, 2.04),
        "a10g": _consumer("NVIDIA A10G", (8, 6), 80, 22, 600, 6, 1.71),
        "4090": _consumer("NVIDIA GeForce RTX 4090", (8, 9), 128, 24, 1008, 72, 2.52),
    }
)
"""Names of `passes.cluster`'s devices -> what XLA:GPU compiles for."""
