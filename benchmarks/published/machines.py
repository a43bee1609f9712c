"""The clusters that were measured on: the table's devices in the hosts of the source."""

from __future__ import annotations

from dataclasses import replace

from passes.cluster import Cluster, HostGroup, parse_cluster
from passes.cluster.accelerators import LINK_SHARE
from passes.cluster.cluster import Link

DGX2_DEVICES = 16
DGX_NETWORK = 100e9
"""Bytes a second of a DGX-2: 8 x 100 Gb/s."""

DGX2H_FLOPS = 39e12 / 0.30
"""The peak of a V100 at 450 W, of which the Megatron paper calls 39 TFLOP/s 30 %."""


def hosts_of(device: str, devices: int, each: int = 8) -> Cluster:
    """So many devices of the table in hosts of `each`, or fewer on one host. Raises ValueError for uneven hosts."""
    if devices <= each:
        return parse_cluster(f"{devices}:{device}")
    if devices % each:
        raise ValueError(f"{devices} devices do not fill hosts of {each}")
    return parse_cluster(f"{devices // each}x{each}:{device}")


def machine(gpu: str, devices: int) -> Cluster | None:
    """The cluster of so many devices that a source calls `gpu`; None for a device that the table does not have."""
    name = gpu.lower()
    if "a100" in name and "40gb" in name:  # in a DGX, whose network is that of the larger card's
        large, small = hosts_of("a100-80g", devices), hosts_of("a100-40g", devices)
        return _grouped(small, replace(small.group(), inter=large.group().inter))
    if "a100" in name:
        return hosts_of("a100-80g", devices)
    if "h100" in name:
        return hosts_of("h100", devices)
    if "v100" in name and "dgx-2" in name:
        return _dgx2(devices, fast="dgx-2h" in name)
    if "tpu v3" in name:
        return hosts_of("tpu-v3", devices)
    return None


def _dgx2(devices: int, *, fast: bool) -> Cluster:
    """DGX-2 hosts of 16 V100 with 32 GB, or DGX-2H, whose cards take more power."""
    found = hosts_of("v100-32g", devices, DGX2_DEVICES)
    group = found.group()
    inter = Link(alpha_seconds=group.inter.alpha_seconds, bytes_per_second=LINK_SHARE * DGX_NETWORK)
    device = group.device
    if fast:
        device = replace(device, flops_per_second={**device.flops_per_second, "float16": DGX2H_FLOPS})
    return _grouped(found, replace(group, inter=inter, device=device))


def _grouped(cluster: Cluster, group: HostGroup) -> Cluster:
    return replace(cluster, groups=(group,))
