"""The known accelerators and the hosts that they come in, each number with its source.

Peaks of matrix units and memory are data-sheet values. What is reached of them, and what links give, is measured:

- Inside a host: bandwidth fitted where a collective was measured, else a share of the data sheet (`links`).
- Between hosts: a share of the data sheet, on a fabric without congestion. What one cluster was seen to give is for a
  description of that cluster (a JSON file; for published ones, benchmarks/published/machines.py).
- Latency: as NCCL counts it.

`python -m benchmarks.collectives --fit` fits them again, to measurements that papers and repositories have published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.cluster.cluster import Cluster, DeviceSpec, HostGroup, Link, Wiring
from passes.cluster.links import (
    ICI_ALPHA_SECONDS,
    ICI_SHARE,
    LINK_SHARE,
    PCIE_SHARE,
    SEND_OVERLAP,
    SEND_SECONDS,
    gpu_link,
    network,
    plain,
)

MATMUL_EFFICIENCY = 0.80
"""Where it was not measured: the median of where it was (A100 0.87, H100 0.80, B200 0.78, GB200 0.73, v6e 0.90)."""


HALF_INNER = 64.0
"""Steps along the inner dimension that a tile of a product begins and ends in: two of the 32 that a GPU's library loads
at a time (CUTLASS's default for half precision on A100) on either side of the loop."""


MEMORY_EFFICIENCY = 0.85
"""Of a GPU's data-sheet bandwidth, assumed: large copies reach from 80 to 90 %."""


CPU = "cpu"
"""The name of virtual CPU devices, which share the memory of their machine."""


CPU_CORE_FLOPS_PER_SECOND = 85e9
"""Of float32 products on one core; measured like the rest of `cpu` (`python -m benchmarks.collectives --local`)."""


CPU_MEMORY_BYTES_PER_SECOND = 24e9
"""Of a machine, which its virtual devices share; measured like the rest of `cpu`."""


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
        """The cluster of `hosts` such hosts, named `2x8:h100` unless `name` is given."""
        per_host = devices_per_host or self.devices_per_host
        group = HostGroup(
            hosts=hosts,
            devices_per_host=per_host,
            device=self.device,
            intra=self.intra,
            inter=self.inter,
            adapters=self.adapters,
            wiring=self.wiring,
        )
        text = f"{per_host}:{self.device.name}" if hosts == 1 else f"{hosts}x{per_host}:{self.device.name}"
        return Cluster(name=name or text, groups=(group,))


def virtual_cpu(cores: int, memory_nbytes: int, devices: int) -> DeviceSpec:
    """The device that stands for one of `devices` virtual CPU devices on one machine."""
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


def _gpu(
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


def _tensor_cores(half: float, float32: float, float8: float = 0.0) -> Mapping[str, float]:
    """Dense peaks in TFLOP/s; JAX multiplies float32 as TF32 by default where there is TF32."""
    eights = {"float8_e4m3fn": float8, "float8_e5m2": float8} if float8 else {}
    return {"bfloat16": half, "float16": half, "float32": float32, **eights}


def _tpu(
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
    """A slice of one pod: hosts, too, are joined by ICI. JAX multiplies float32 in one bfloat16 pass by default."""
    ici = ICI_SHARE * ici_gb_per_second
    return _gpu(
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


TABLE = (
    _gpu(
        "v100-16g",
        "Tesla V100-SXM2-16GB",
        tflops={"float16": 125, "float32": 15.7},
        cores=80,
        memory_gib=16,
        memory_gb_per_second=900,
        intra=gpu_link(LINK_SHARE * 150),
        wiring="hybrid cube mesh",
        inter=network(3.125),
        source="data sheet; AWS p3.16xlarge (25 Gb/s); no bfloat16 units, so bfloat16 runs at the float32 rate",
    ),
    _gpu(
        "v100-32g",
        "Tesla V100-SXM2-32GB",
        "Tesla V100-SXM3-32GB",
        tflops={"float16": 125, "float32": 15.7},
        cores=80,
        memory_gib=32,
        memory_gb_per_second=900,
        intra=gpu_link(LINK_SHARE * 150),
        wiring="hybrid cube mesh",
        inter=network(12.5),
        source="data sheet; AWS p3dn.24xlarge (100 Gb/s); no bfloat16 units, so bfloat16 runs at the float32 rate",
    ),
    _gpu(
        "a100-40g",
        "NVIDIA A100-SXM4-40GB",
        tflops=_tensor_cores(312, 156),
        cores=108,
        memory_gib=40,
        memory_gb_per_second=1555,
        intra=gpu_link(204),
        inter=network(50),
        adapters=4,
        source="data sheet; AWS p4d.24xlarge (4 x 100 Gb/s); matmul 271.2 TFLOP/s: stas00/ml-engineering; "
        "NVLink fitted: Galvatron's 8-GPU nodes",
        matmul_efficiency=271.2 / 312,
    ),
    _gpu(
        "a100-80g",
        "NVIDIA A100-SXM4-80GB",
        tflops=_tensor_cores(312, 156),
        cores=108,
        memory_gib=80,
        memory_gb_per_second=2039,
        intra=gpu_link(204),
        inter=network(200),
        adapters=8,
        source="data sheet; DGX A100 (8 x 200 Gb/s); matmul 271.2 TFLOP/s: stas00/ml-engineering; "
        "NVLink fitted: Galvatron's 8-GPU nodes",
        matmul_efficiency=271.2 / 312,
    ),
    _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        tflops=_tensor_cores(989, 494.5, 1979),
        cores=132,
        memory_gib=80,
        memory_gb_per_second=3350,
        intra=gpu_link(366, reduces=True),
        inter=network(400),
        adapters=8,
        source="data sheet; DGX H100, AWS p5.48xlarge (3200 Gb/s); matmul 794.5 TFLOP/s: stas00/ml-engineering; "
        "NVLink as on H200",
        matmul_efficiency=794.5 / 989,
    ),
    _gpu(
        "h200",
        "NVIDIA H200",
        tflops=_tensor_cores(989, 494.5, 1979),
        cores=132,
        memory_gib=140,
        memory_gb_per_second=4800,
        intra=gpu_link(366, reduces=True),
        inter=network(400),
        adapters=8,
        source="data sheet; AWS p5en.48xlarge (3200 Gb/s); matmul as on H100; NVLink fitted: stas00/ml-engineering",
        matmul_efficiency=794.5 / 989,
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        tflops=_tensor_cores(2250, 1125, 4500),
        cores=148,
        memory_gib=179,
        memory_gb_per_second=8000,
        intra=gpu_link(680, reduces=True),
        inter=network(400),
        adapters=8,
        source="data sheet; AWS p6-b200.48xlarge (3200 Gb/s); matmul 1745 TFLOP/s and NVLink (fitted): "
        "stas00/ml-engineering",
        matmul_efficiency=1745 / 2250,
    ),
    _gpu(
        "gb200",
        "NVIDIA GB200",
        tflops=_tensor_cores(2500, 1250, 5000),
        cores=152,
        memory_gib=185,
        memory_gb_per_second=8000,
        intra=gpu_link(680, reduces=True),
        inter=gpu_link(4 * 680),
        adapters=4,
        source="data sheet; matmul 1822 TFLOP/s: stas00/ml-engineering; NVLink as on B200, also between the trays of "
        "an NVL72 (18), which is as far as this entry reaches",
        matmul_efficiency=1822 / 2500,
        devices_per_host=4,
    ),
    _gpu(
        "gb300",
        "NVIDIA GB300",
        tflops=_tensor_cores(2500, 1250, 5000),
        cores=160,
        memory_gib=277,
        memory_gb_per_second=8000,
        intra=gpu_link(680, reduces=True),
        inter=gpu_link(4 * 680),
        adapters=4,
        source="data sheet, memory of B300 assumed; matmul and NVLink as on GB200, up to one NVL72",
        matmul_efficiency=1822 / 2500,
        devices_per_host=4,
    ),
    _gpu(
        "l4",
        "NVIDIA L4",
        tflops=_tensor_cores(121, 60, 242.5),
        cores=58,
        memory_gib=22,
        memory_gb_per_second=300,
        intra=gpu_link(PCIE_SHARE * 31),
        inter=network(12.5),
        source="data sheet; AWS g6.48xlarge (100 Gb/s); half of the peak assumed: a 72 W card does not sustain it",
        matmul_efficiency=0.5,
    ),
    _gpu(
        "a10g",
        "NVIDIA A10G",
        tflops=_tensor_cores(70, 35),
        cores=80,
        memory_gib=22,
        memory_gb_per_second=600,
        intra=gpu_link(PCIE_SHARE * 31),
        inter=network(12.5),
        source="data sheet (70 TFLOP/s; the A10's says 125); AWS g5.48xlarge (100 Gb/s)",
    ),
    _gpu(
        "4090",
        "NVIDIA GeForce RTX 4090",
        tflops=_tensor_cores(165.2, 82.6, 330.3),
        cores=128,
        memory_gib=24,
        memory_gb_per_second=1008,
        intra=gpu_link(PCIE_SHARE * 31),
        inter=network(1.25),
        source="NVIDIA Ada white paper; no peer access, so data goes through the host; 10 Gb/s Ethernet assumed",
    ),
    _tpu(
        "tpu-v3",
        "TPU v3",
        tflops=61.5,
        memory_gib=16,
        memory_gb_per_second=450,
        ici_gb_per_second=200,
        devices_per_host=8,
        wiring="2d torus of 16",
        source="vendor figures, halved: each of a chip's two cores is a JAX device",
    ),
    _tpu(
        "tpu-v4",
        "TPU v4",
        tflops=275,
        memory_gib=32,
        memory_gb_per_second=1200,
        ici_gb_per_second=270,
        devices_per_host=4,
        wiring="3d torus of 4",
        source="vendor figures: jax-ml/scaling-book, tpus.md",
    ),
    _tpu(
        "tpu-v5e",
        "TPU v5 lite",
        "TPU v5e",
        tflops=197,
        memory_gib=16,
        memory_gb_per_second=810,
        ici_gb_per_second=180,
        devices_per_host=8,
        wiring="2d torus of 16",
        source="vendor figures: jax-ml/scaling-book, tpus.md",
    ),
    _tpu(
        "tpu-v5p",
        "TPU v5",
        "TPU v5p",
        tflops=459,
        memory_gib=95,
        memory_gb_per_second=2765,
        ici_gb_per_second=540,
        devices_per_host=4,
        wiring="3d torus of 4",
        source="vendor figures: jax-ml/scaling-book, tpus.md",
    ),
    _tpu(
        "tpu-v6e",
        "TPU v6 lite",
        "TPU v6e",
        tflops=918,
        memory_gib=32,
        memory_gb_per_second=1640,
        ici_gb_per_second=360,
        devices_per_host=8,
        wiring="2d torus of 16",
        source="vendor figures: jax-ml/scaling-book, tpus.md; matmul 827.5 TFLOP/s: AI-Hypercomputer/tpu-recipes",
        matmul_efficiency=827.5 / 918,
    ),
    _tpu(
        "tpu-7x",
        "TPU7x",
        "TPU v7x",
        tflops=1153.5,
        memory_gib=96,
        memory_gb_per_second=3690,
        ici_gb_per_second=300,
        devices_per_host=8,
        wiring="3d torus of 4",
        source="vendor figures, halved: each half of a chip is a JAX device; matmul 956 TFLOP/s: "
        "AI-Hypercomputer/tpu-recipes",
        matmul_efficiency=956 / 1153.5,
    ),
    HostSpec(
        device=virtual_cpu(cores=2, memory_nbytes=16 * 2**30, devices=8),
        devices_per_host=8,
        intra=plain(0.93, 15e-6),
        inter=plain(1, 100e-6),
        kinds=("cpu",),
    ),
)
