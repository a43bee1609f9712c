"""Descriptions of devices and their hosts, from a data sheet's numbers and the shares of them that are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.cluster.cluster import Cluster, DeviceSpec, HostGroup, Link, Wiring
from passes.cluster.links import (
    BUCKET_NBYTES,
    COLLECTIVE_OVERLAP,
    ICI_ALPHA_SECONDS,
    ICI_SHARE,
    SEND_OVERLAP,
    SEND_SECONDS,
    plain,
)

MATMUL_EFFICIENCY = 0.80
"""The share of a data sheet's peak that products reach where it was not measured: the median of five devices for which
it was (A100 0.87, H100 0.80, B200 0.78, GB200 0.73, v6e 0.90).
"""


HALF_INNER = 64.0
"""Steps along the inner dimension that a tile of a product begins and ends in: two of the 32 that a GPU's library loads
at a time (CUTLASS's default for half precision on A100) on either side of the loop."""


MEMORY_EFFICIENCY = 0.85
"""The share of a GPU's data-sheet bandwidth that operators reach, assumed: large copies reach 80 to 90 %."""


CPU = "cpu"
"""The name of virtual CPU devices, which share the memory of their machine."""


CPU_CORE_FLOPS_PER_SECOND = 85e9
"""The rate of float32 products on one core; measured like the rest of `cpu` (`python -m benchmarks.collectives
--local`)."""


CPU_MEMORY_BYTES_PER_SECOND = 24e9
"""The rate of a machine's memory, which its virtual devices share; measured like the rest of `cpu`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A device and the host it usually comes in; `kinds` are the names that JAX gives it (`Device.device_kind`)."""

    device: DeviceSpec
    devices_per_host: int
    intra: Link
    inter: Link
    kinds: tuple[str, ...] = ()
    adapters: int = 1
    wiring: Wiring = "switch"

    def cluster(self, hosts: int, devices_per_host: int | None = None, name: str = "") -> Cluster:
        """The cluster of `hosts` such hosts, with the given name or one such as `2x8:h100`.

        A host with fewer devices than usual has the same part of its adapters and of its network link.
        """
        per_host = devices_per_host or self.devices_per_host
        whole = HostGroup(
            hosts=hosts,
            devices_per_host=self.devices_per_host,
            device=self.device,
            intra=self.intra,
            inter=self.inter,
            adapters=self.adapters,
            wiring=self.wiring,
        )
        group = whole.with_devices(per_host)
        return Cluster(name=name or str(group), groups=(group,))


def virtual_cpu(cores: int, memory_nbytes: int, devices: int) -> DeviceSpec:
    """The spec of each of `devices` virtual CPU devices that share one machine."""
    return DeviceSpec(
        name=CPU,
        flops_per_second={"float32": cores * CPU_CORE_FLOPS_PER_SECOND / devices},
        matmul_efficiency=1.0,
        memory_nbytes=memory_nbytes // devices,
        memory_bytes_per_second=CPU_MEMORY_BYTES_PER_SECOND / devices,
        launch_seconds=6e-6,
        source="measured on 2 cores (Xeon, 2.5 GHz, AVX-512) with 8 virtual devices at once: "
        "python -m benchmarks.collectives --local; between processes assumed: loopback; "
        "widened: float-normalization-bf16 in the CPU compiler's pipeline, xla_dump_hlo_pass_re, jaxlib 0.10",
        widened={"bfloat16": "float32"},
    )


def gpu_host(
    name: str,
    *kinds: str,
    tflops: Mapping[str, float],
    memory_gib: int,
    memory_gb_per_second: float,
    intra: Link,
    inter: Link,
    source: str,
    cores: int = 0,
    matmul_efficiency: float = MATMUL_EFFICIENCY,
    memory_efficiency: float = MEMORY_EFFICIENCY,
    devices_per_host: int = 8,
    adapters: int = 1,
    wiring: Wiring = "switch",
    send_seconds: float = SEND_SECONDS,
    send_overlap: float = SEND_OVERLAP,
    launch_seconds: float = 3e-6,  # a short kernel on V100: 2.9 us, 3.4 in a graph (Gray, "CUDA Graphs", NVIDIA 2019)
) -> HostSpec:
    """A host of GPUs, from the numbers of its data sheet."""
    return HostSpec(
        device=DeviceSpec(
            name=name,
            flops_per_second={dtype: rate * 1e12 for dtype, rate in tflops.items()},
            matmul_efficiency=matmul_efficiency,
            memory_nbytes=memory_gib * 2**30,
            memory_bytes_per_second=memory_gb_per_second * 1e9,
            launch_seconds=launch_seconds,
            send_seconds=send_seconds,
            send_overlap=send_overlap,
            collective_overlap=COLLECTIVE_OVERLAP,
            bucket_nbytes=BUCKET_NBYTES,
            source=source,
            cores=cores,
            half_inner=HALF_INNER if cores else 0.0,
            memory_efficiency=memory_efficiency,
        ),
        devices_per_host=devices_per_host,
        intra=intra,
        inter=inter,
        kinds=kinds,
        adapters=adapters,
        wiring=wiring,
    )


def tensor_cores(half: float, float32: float, float8: float = 0.0) -> Mapping[str, float]:
    """Dense peaks by dtype, from TFLOP/s; JAX multiplies float32 as TF32 by default where the device has TF32."""
    eights = {"float8_e4m3fn": float8, "float8_e5m2": float8} if float8 else {}
    return {"bfloat16": half, "float16": half, "float32": float32, **eights}


def tpu_host(
    name: str,
    *kinds: str,
    tflops: float,
    memory_gib: int,
    memory_gb_per_second: float,
    ici_gb_per_second: float,
    devices_per_host: int,
    wiring: Wiring,
    source: str,
    matmul_efficiency: float = MATMUL_EFFICIENCY,
) -> HostSpec:
    """A slice of one TPU pod, whose hosts are joined by ICI as well. JAX multiplies float32 in one bfloat16 pass by
    default.
    """
    ici = ICI_SHARE * ici_gb_per_second
    return gpu_host(
        name,
        *kinds,
        tflops={"bfloat16": tflops, "float32": tflops},
        memory_gib=memory_gib,
        memory_gb_per_second=memory_gb_per_second,
        intra=plain(ici, ICI_ALPHA_SECONDS),
        inter=plain(ici * devices_per_host, ICI_ALPHA_SECONDS),
        wiring=wiring,
        send_seconds=0.0,  # and nobody waits for it, assumed: we know of no publication that times it
        send_overlap=1.0,
        source=source,
        matmul_efficiency=matmul_efficiency,
        memory_efficiency=1.0,
        devices_per_host=devices_per_host,
        launch_seconds=1.6e-6,  # assumed: we know of no publication that times it
    )
