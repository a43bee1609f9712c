"""The clusters of the sources: devices of autopar's device table, in hosts and under software as each source had."""

from __future__ import annotations

from dataclasses import replace

from passes.cluster import Cluster, HostGroup, parse_cluster
from passes.cluster.cluster import Link, Measured
from passes.cluster.devices import host_spec
from passes.cluster.links import NETWORK_SHARE

DGX2_DEVICES = 16
DGX_NETWORK = 100e9
"""Bytes a second of the network of a DGX-2: 8 x 100 Gb/s."""

MATMULS_OF_2021 = 225e12 / 312e12
"""The share of an A100's peak that large products reached with the libraries of early 2021, fitted to two rows of
Megatron-LM's figure 11, 3 layers at batches of 8 and 128: 188 ms a microbatch, of which 45 are passes over elements,
dropout's too, and collectives. Later libraries reach 271 TFLOP/s (the table), which times of tasks published in 2023
agree with."""

MATMULS_OF_2023 = 254e12 / 312e12
"""The share of an A100's peak that large products reached in Zero Bubble's trainings: **fitted** to its times of
weights' gradients (table 6, T_W), which are such products and little else. Its four models agree within 3 %."""

MEMORY_OF_2023 = 0.56
"""The share of an A100's memory bandwidth that Megatron-LM's kernels between products reached there: **fitted** to the
other times of table 6, T_F and T_B. Dropout is among them, which random numbers bound: 268 million elements in half
precision take 1.2 ms on an A100 by themselves (EleutherAI's cookbook), 0.55 of the bandwidth."""

MATMULS_OF_2019 = 0.44
"""The share of a V100's peak that stands for all of the software of the first Megatron-LM paper, not products alone:
fitted to one row, 1.2 billion parameters on one GPU, the baseline that the paper gives the others relative to."""

DGX2H_FLOPS = 39e12 / 0.30
"""The peak of a V100 at 450 W, of which the Megatron paper calls 39 TFLOP/s 30 %."""

AWS_P5_LINK = replace(host_spec("h100").inter, bytes_per_second=296e9, congestion=0.59)
"""The network of a host in nanotron's shared cluster of 1 to 64 AWS p5 hosts, which is congested: of the exponents from
0 up, the one nearest to its 21 medians of collectives of 256 MB (`python -m benchmarks.collectives --fit`)."""

AWS_P5_TRAINING_LINK = replace(AWS_P5_LINK, congestion=0.3)
"""The network of the same hosts as nanotron's jobs see it: **fitted** to 55 of them in one stage on 4 to 64 hosts, of
the exponents 0, 0.1, 0.2, 0.3 and 0.59. They sum 2 to 18 GB in groups of a part of each host; the medians are of 256 MB
over all."""


HOP_OF_2021 = 15e-6
"""Seconds of a hop of an all-reduce in a host of A100 that layers wait for, with the libraries of early 2021 and the
wait for the slowest device: **fitted** to Megatron-LM's figure 15, where each of a layer's six of 15.7 MB takes 0.07 ms
more on 4 devices and 0.14 on 8 than with the 5 us of long messages (`links.ALPHA_SECONDS`), and none on 2."""


SELENE_LINK = replace(host_spec("a100-80g").inter, bytes_per_second=84e9)
"""The network of a DGX A100 in NVIDIA's Selene: the geometric mean of what gradients reach there, `SELENE_SUMS` and, in
the largest model, 101 GB/s (section 5.9: 12.9 TB/s over 1,024 adapters)."""

SELENE_SUMS = {1: 163e9, 2: 57e9, 4: 53e9, 8: 85e9}
"""Bytes a second of a host whose devices are in so many groups that sum gradients at once, each with devices of every
host: **fitted** to Megatron-LM SC 2021, Figs. 14 and 15, by the difference of batches. A group of a part of a host does
not have that part of its adapters; the paper does not say why."""


def aws_p5(devices: int) -> Cluster:
    """So many H100 of nanotron's cluster, as its jobs see them."""
    return _with_network(hosts_of("h100", devices), AWS_P5_TRAINING_LINK)


def hosts_of(device: str, devices: int, each: int = 8) -> Cluster:
    """So many devices of the table in hosts of `each`, or fewer on one host. Raises ValueError for uneven hosts.

    Plans have layers as a loop, as that is planned sooner; what was measured ran them one by one, without copies of the
    slices that a loop reads, so the device `unrolls` loops.
    """
    if devices > each and devices % each:
        raise ValueError(f"{devices} devices do not fill hosts of {each}")
    cluster = parse_cluster(f"{devices}:{device}" if devices <= each else f"{devices // each}x{each}:{device}")
    group = cluster.group()
    return _with_group(cluster, replace(group, device=replace(group.device, unrolls=True)))


def machine(gpu: str, devices: int) -> Cluster | None:
    """The cluster of so many devices that a source calls `gpu`; None for a device that the table does not have."""
    name = gpu.lower()
    if "a100" in name and "40gb" in name:  # in a DGX, whose network is that of the larger card's
        return _without_overlap(_with_network(hosts_of("a100-40g", devices), SELENE_LINK))
    if "a100" in name and "dgx" in name:
        return _without_overlap(_with_network(hosts_of("a100-80g", devices), SELENE_LINK))
    if "a100" in name:
        return _without_overlap(hosts_of("a100-80g", devices))
    if "h100" in name:
        return hosts_of("h100", devices)
    if "v100" in name and "dgx-2" in name:
        return _without_overlap(_dgx2(devices, fast="dgx-2h" in name))
    if "tpu v3" in name:
        return hosts_of("tpu-v3", devices)
    return None


def with_hops(cluster: Cluster, hop_seconds: float) -> Cluster:
    """The cluster whose all-reduces in a host, and halves of them, are rings whose every hop takes so many seconds."""
    group = cluster.group()
    rings = [
        Measured(
            kind=kind,
            ranks=ranks,
            alpha_seconds=rounds * (ranks - 1) * hop_seconds,
            bytes_per_second=group.intra.bytes_per_second * ranks / (rounds * (ranks - 1)),
        )
        for kind, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1))
        for ranks in range(2, group.devices_per_host + 1)
    ]
    return _with_group(cluster, replace(group, measured=tuple(rings)))


def with_summing_groups(cluster: Cluster, groups: int) -> Cluster:
    """The cluster in Selene with the network's rate of so many groups that sum gradients at once, if measured."""
    group = cluster.group()
    rate = SELENE_SUMS.get(groups, group.inter.bytes_per_second)
    return _with_group(cluster, replace(group, inter=replace(group.inter, bytes_per_second=rate)))


def _without_overlap(cluster: Cluster) -> Cluster:
    """The cluster with Megatron-LM of 2019 to 2021, which sums gradients up after the backward pass, behind nothing."""
    group = cluster.group()
    return _with_group(cluster, replace(group, device=replace(group.device, collective_overlap=0.0)))


def with_fused_attention(cluster: Cluster) -> Cluster:
    """The cluster with software that fuses attention, as FlashAttention does."""
    group = cluster.group()
    return _with_group(cluster, replace(group, device=replace(group.device, fuses_attention=True)))


def with_matmul_efficiency(cluster: Cluster, matmul_efficiency: float) -> Cluster:
    """The cluster with a library whose large products reach this share of the peak."""
    group = cluster.group()
    return _with_group(cluster, replace(group, device=replace(group.device, matmul_efficiency=matmul_efficiency)))


def with_memory_efficiency(cluster: Cluster, memory_efficiency: float) -> Cluster:
    """The cluster with software whose kernels between products reach this share of the memory's bandwidth."""
    group = cluster.group()
    return _with_group(cluster, replace(group, device=replace(group.device, memory_efficiency=memory_efficiency)))


def _dgx2(devices: int, *, fast: bool) -> Cluster:
    """DGX-2 hosts of 16 V100 with 32 GB, or DGX-2H, whose cards take more power."""
    hosts = hosts_of("v100-32g", devices, DGX2_DEVICES)
    group = hosts.group()
    inter = replace(group.inter, bytes_per_second=NETWORK_SHARE * DGX_NETWORK)
    device = group.device
    if fast:
        device = replace(device, flops_per_second={**device.flops_per_second, "float16": DGX2H_FLOPS})
    return _with_group(hosts, replace(group, inter=inter, adapters=8, wiring="switch", device=device))


def _with_network(cluster: Cluster, inter: Link) -> Cluster:
    """The cluster with other links between hosts, each of eight adapters."""
    return _with_group(cluster, replace(cluster.group(), inter=inter, adapters=8))


def _with_group(cluster: Cluster, group: HostGroup) -> Cluster:
    return replace(cluster, groups=(group,))
