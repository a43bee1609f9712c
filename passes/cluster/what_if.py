"""Variations of a cluster for what-if questions: more devices of its kind, slower devices, faster links."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from passes.cluster.cluster import Cluster, DeviceSpec, Link, Measured
from passes.errors import ClusterError, explain

Line = TypeVar("Line", Link, Measured)
"""A link or a measured collective: seconds as a line over bytes."""

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
    taken = replace(group, hosts=max(hosts, 1)).with_devices(group.devices_per_host if hosts else devices)
    return replace(cluster, name=str(taken), groups=(taken,))


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

    def longer(line: Line) -> Line:
        """A link, or a measured collective, that takes `communication` times as long for any message."""
        seconds, rate = line.alpha_seconds * communication, line.bytes_per_second / communication
        return replace(line, alpha_seconds=seconds, bytes_per_second=rate)

    calibrated = replace(
        group,
        device=device,
        intra=longer(group.intra),
        inter=longer(group.inter),
        measured=tuple(map(longer, group.measured)),
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

    def faster(line: Line, times: float) -> Line:
        """A link, or a measured collective, of `times` the bytes per second."""
        return replace(line, bytes_per_second=times * line.bytes_per_second)

    scaled = replace(
        group,
        intra=faster(group.intra, factor),
        inter=faster(group.inter, factor * network_factor),
        measured=tuple(faster(seen, factor) for seen in group.measured),
    )
    words = [f"links x {factor:g}"] if factor != 1 else []
    words += [f"network x {network_factor:g}"] if network_factor != 1 else []
    return replace(cluster, name=", ".join([cluster.name, *words]), groups=(scaled,))
