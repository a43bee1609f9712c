"""The known accelerators and the hosts that they come in, each number with its source.

Peaks of matrix units and memory are data-sheet values. What is reached of them, and what links give, is measured:

- Inside a host: bandwidth fitted where a collective was measured, else a share of the data sheet (`links`).
- Between hosts: a share of the data sheet, on a fabric without congestion. What one cluster was seen to give is for a
  description of that cluster (a JSON file; for published ones, benchmarks/published/machines.py).
- Latency: as NCCL counts it.

`python -m benchmarks.collectives --fit` fits them again, to measurements that papers and repositories have published.
"""

from __future__ import annotations

from passes.cluster.hosts import HostSpec, gpu_host, tensor_cores, tpu_host, virtual_cpu
from passes.cluster.links import LINK_SHARE, PCIE_SHARE, gpu_link, network, plain

HOPPER_MATMULS = 0.68
"""The share of an H100's peak that large products keep up in a training, **fitted** between trainings that were
measured: 0.70 in MaxText's LLaMA 2 of 7 billion parameters on one host, 0.63 in nanotron's of 8, and 0.63 or less in
MosaicML's table (`python -m benchmarks.published --source maxtext,nanotron,llm-foundry`). Products by themselves reach
0.80 (stas00/ml-engineering)."""

TPU_V5_MATMULS = 0.95
"""The share of the peak that large products reach on v5e and v5p: **fitted** to MaxText's 32 billion parameters on
either, whose steps are still predicted 2 and 4 % too slow. On v6e products by themselves reach 0.90."""

TABLE = (
    gpu_host(
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
    gpu_host(
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
    gpu_host(
        "a100-40g",
        "NVIDIA A100-SXM4-40GB",
        tflops=tensor_cores(312, 156),
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
    gpu_host(
        "a100-80g",
        "NVIDIA A100-SXM4-80GB",
        tflops=tensor_cores(312, 156),
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
    gpu_host(
        "h100",
        "NVIDIA H100 80GB HBM3",
        tflops=tensor_cores(989, 494.5, 1979),
        cores=132,
        memory_gib=80,
        memory_gb_per_second=3350,
        intra=gpu_link(366, reduces=True),
        inter=network(400),
        adapters=8,
        source="data sheet; DGX H100, AWS p5.48xlarge (3200 Gb/s); matmul fitted: MaxText; NVLink as on H200",
        matmul_efficiency=HOPPER_MATMULS,
    ),
    gpu_host(
        "h200",
        "NVIDIA H200",
        tflops=tensor_cores(989, 494.5, 1979),
        cores=132,
        memory_gib=140,
        memory_gb_per_second=4800,
        intra=gpu_link(366, reduces=True),
        inter=network(400),
        adapters=8,
        source="data sheet; AWS p5en.48xlarge (3200 Gb/s); matmul as on H100; NVLink fitted: stas00/ml-engineering",
        matmul_efficiency=HOPPER_MATMULS,
    ),
    gpu_host(
        "b200",
        "NVIDIA B200",
        tflops=tensor_cores(2250, 1125, 4500),
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
    gpu_host(
        "gb200",
        "NVIDIA GB200",
        tflops=tensor_cores(2500, 1250, 5000),
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
    gpu_host(
        "gb300",
        "NVIDIA GB300",
        tflops=tensor_cores(2500, 1250, 5000),
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
    gpu_host(
        "l4",
        "NVIDIA L4",
        tflops=tensor_cores(121, 60, 242.5),
        cores=58,
        memory_gib=22,
        memory_gb_per_second=300,
        intra=gpu_link(PCIE_SHARE * 31),
        inter=network(12.5),
        source="data sheet; AWS g6.48xlarge (100 Gb/s); half of the peak assumed: a 72 W card does not sustain it",
        matmul_efficiency=0.5,
    ),
    gpu_host(
        "a10g",
        "NVIDIA A10G",
        tflops=tensor_cores(70, 35),
        cores=80,
        memory_gib=22,
        memory_gb_per_second=600,
        intra=gpu_link(PCIE_SHARE * 31),
        inter=network(12.5),
        source="data sheet (70 TFLOP/s; the A10's says 125); AWS g5.48xlarge (100 Gb/s)",
    ),
    gpu_host(
        "4090",
        "NVIDIA GeForce RTX 4090",
        tflops=tensor_cores(165.2, 82.6, 330.3),
        cores=128,
        memory_gib=24,
        memory_gb_per_second=1008,
        intra=gpu_link(PCIE_SHARE * 31),
        inter=network(1.25),
        source="NVIDIA Ada white paper; no peer access, so data goes through the host; 10 Gb/s Ethernet assumed",
    ),
    tpu_host(
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
    tpu_host(
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
    tpu_host(
        "tpu-v5e",
        "TPU v5 lite",
        "TPU v5e",
        tflops=197,
        memory_gib=16,
        memory_gb_per_second=810,
        ici_gb_per_second=180,
        devices_per_host=8,
        wiring="2d torus of 16",
        source="vendor figures: jax-ml/scaling-book, tpus.md; matmul fitted: MaxText",
        matmul_efficiency=TPU_V5_MATMULS,
    ),
    tpu_host(
        "tpu-v5p",
        "TPU v5",
        "TPU v5p",
        tflops=459,
        memory_gib=95,
        memory_gb_per_second=2765,
        ici_gb_per_second=540,
        devices_per_host=4,
        wiring="3d torus of 4",
        source="vendor figures: jax-ml/scaling-book, tpus.md; matmul fitted: MaxText",
        matmul_efficiency=TPU_V5_MATMULS,
    ),
    tpu_host(
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
    tpu_host(
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
