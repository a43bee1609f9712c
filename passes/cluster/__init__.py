"""Clusters, meshes over their devices, and the seconds that collectives and transfers between stages take on them."""

from passes.cluster import collectives, what_if
from passes.cluster.boundaries import boundary_seconds
from passes.cluster.cluster import Cluster, DeviceSpec, HostGroup, Link, Measured
from passes.cluster.collectives import Collective, Kind
from passes.cluster.devices import host_spec, known, local_cluster, parse_cluster, register_device
from passes.cluster.hosts import CPU, HostSpec
from passes.cluster.mesh import Axes, Mesh, shapes

__all__ = [
    "CPU",
    "Axes",
    "Cluster",
    "Collective",
    "DeviceSpec",
    "HostGroup",
    "HostSpec",
    "Kind",
    "Link",
    "Measured",
    "Mesh",
    "boundary_seconds",
    "collectives",
    "host_spec",
    "known",
    "local_cluster",
    "parse_cluster",
    "register_device",
    "shapes",
    "what_if",
]
