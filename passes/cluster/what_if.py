"""Variations of a cluster for what-if questions: more devices of its kind, slower devices, faster links."""

from __future__ import annotations

from dataclasses import replace

from passes.cluster.cluster import Cluster, DeviceSpec, Link, Measured
from passes.errors import ClusterError, explain

_LEAST_FACTOR = 1e-9
"""The least factor for a link's bytes per second, which makes a byte of a gigabyte; the greatest is its reciprocal."""


def resized(cluster: Cluster, devices: int) -> Cluster:
    """The cluster of that many devices on the same kind of hosts: a part of one host, or whole hosts.

    Raises ClusterError for a number of devices that is neither.
    """
    group = cluster.group()
    hosts, rest = divmod(devices, group.devices_per_host)
    if devices < 1 or (hosts and rest):
        rule = f"hosts of {group.devices_per_host} are taken whole, or one of them in part"
        remedy = f"take a multiple of {group.devices_per_host}, or describe the hosts that you mean by cluster="
        raise ClusterError(explain(f"{devices} devices of cluster {cluster.name!r}", rule, "", remedy))
    per_host = group.devices_per_host if hosts else devices
    hosts = hosts or 1
    name = f"{hosts}x{per_host}:{group.device.name}" if hosts > 1 else f"{per_host}:{group.device.name}"
    return replace(cluster, name=name, groups=(replace(group, hosts=hosts).with_devices(per_host),))


def slower_device(device: DeviceSpec, compute: float) -> DeviceSpec:
    """The device that takes `compute` times as long for every operator."""
    return replace(
        device,
        matmul_efficiency=device.matmul_efficiency / compute,
        memory_bytes_per_second=device.memory_bytes_per_second / compute,
        strided_bytes_per_second=device.strided_bytes_per_second / compute,
        product_seconds=device.product_seconds * compute,
        pixel_seconds=device.pixel_seconds * compute,
        launch_seconds=device.launch_seconds * compute,
    )


def slower(cluster: Cluster, compute: float = 1.0, communication: float = 1.0) -> Cluster:
    """The cluster with devices `compute` times as slow for every operator, and links and collectives `communication`
    times as slow.

    Latencies of links are slower, too; what a collective takes to start is not. Peaks stay, as those of data sheets.
    """
    group = cluster.group()
    device = replace(slower_device(group.device, compute), send_seconds=group.device.send_seconds * communication)

    def longer(link: Link) -> Link:
        seconds, rate = link.alpha_seconds * communication, link.bytes_per_second / communication
        return replace(link, alpha_seconds=seconds, bytes_per_second=rate)

    def measured(seen: Measured) -> Measured:
        seconds, rate = seen.alpha_seconds * communication, seen.bytes_per_second / communication
        return replace(seen, alpha_seconds=seconds, bytes_per_second=rate)

    calibrated = replace(
        group,
        device=device,
        intra=longer(group.intra),
        inter=longer(group.inter),
        measured=tuple(map(measured, group.measured)),
    )
    name = f"{cluster.name}, calibrated: compute x {compute:.3g}, communication x {communication:.3g}"
    return replace(cluster, name=name, groups=(calibrated,))


def with_bandwidth(cluster: Cluster, factor: float = 1.0, network_factor: float = 1.0) -> Cluster:
    """The cluster whose links give `factor` times the bytes per second, and those between hosts `network_factor` times
    that; latencies are the same.

    Raises ClusterError for factors that are not between 1e-9 and 1e9: no network lies outside, and times stay finite.
    """
    for times in (factor, network_factor):
        if not _LEAST_FACTOR <= times <= 1 / _LEAST_FACTOR:
            rule = f"a link's bytes per second can be multiplied by {_LEAST_FACTOR:g} to {1 / _LEAST_FACTOR:g}"
            raise ClusterError(explain(f"bandwidth times {times:g}", rule, "", "write, say, 0.5"))
    group = cluster.group()

    def faster(link: Link, times: float) -> Link:
        return replace(link, bytes_per_second=times * link.bytes_per_second)

    def measured(seen: Measured) -> Measured:
        return replace(seen, bytes_per_second=factor * seen.bytes_per_second)

    scaled = replace(
        group,
        intra=faster(group.intra, factor),
        inter=faster(group.inter, factor * network_factor),
        measured=tuple(map(measured, group.measured)),
    )
    words = [f"links x {factor:g}"] if factor != 1 else []
    words += [f"network x {network_factor:g}"] if network_factor != 1 else []
    return replace(cluster, name=", ".join([cluster.name, *words]), groups=(scaled,))
