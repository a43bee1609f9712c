"""Hosts, devices and the links between them: what a plan is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A network under the alpha-beta model: `alpha_seconds` a message, then `bytes_per_second` in one direction."""

    alpha_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator, each number with its `source`.

    `flops_per_second` maps dtype names to the dense matrix-product peak; `matmul_efficiency` is the share of it that
    large products reach; `launch_seconds` is the floor of one fused kernel.
    """

    name: str
    flops_per_second: Mapping[str, float]
    matmul_efficiency: float
    memory_nbytes: int
    memory_bytes_per_second: float
    launch_seconds: float
    source: str

    def matmul_flops_per_second(self, dtype: str) -> float:
        """The rate that large matrix products of `dtype` reach; an unlisted dtype runs at the slowest listed peak."""
        peaks = self.flops_per_second
        return peaks.get(dtype, min(peaks.values())) * self.matmul_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """`hosts` equal machines of `devices_per_host` devices.

    `intra` is a device's link to the others on its host; `inter` is one host's link to the network, shared by its
    devices.
    """

    hosts: int
    devices_per_host: int
    device: DeviceSpec
    intra: Link
    inter: Link

    @property
    def n_devices(self) -> int:
        return self.hosts * self.devices_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Host groups in order; devices are numbered host by host."""

    name: str
    groups: tuple[HostGroup, ...]

    @property
    def n_devices(self) -> int:
        return sum(group.n_devices for group in self.groups)

    def group(self) -> HostGroup:
        """The only host group. Raises ClusterError for a cluster of several kinds of hosts."""
        if len(self.groups) != 1:
            raise ClusterError(f"cluster {self.name!r} mixes {len(self.groups)} kinds of hosts; plan each kind by itself")
        return self.groups[0]
