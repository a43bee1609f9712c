"""Devices of accelerators that are not here, which their own compilers compile for: XLA:GPU and XLA:TPU run on a CPU.

Each comes in a package of its own, an extra of autopar's. Checked with jax 0.10.2, jax-cuda12-pjrt 0.10.2 and libtpu
0.0.42.1.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.experimental import topologies

from autopar.errors import DeviceError, explain
from autopar.jax_compat import Device
from autopar.tools.gpu_targets import GPU_TARGETS
from passes.cluster import Cluster, parse_cluster

EXTRAS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "gpu": ("jax_plugins.xla_cuda12", "jax-cuda12-pjrt and jax-cuda12-plugin", "gpu-compiler"),
        "tpu": ("libtpu", "libtpu", "tpu-compiler"),
    }
)
"""Platform -> the module that holds its compiler, the packages that bring it, and the extra that installs them."""

_TPUS: Mapping[str, tuple[str, int, Mapping[str, str]]] = MappingProxyType(
    {
        "tpu-v3": ("v3", 2, {}),
        "tpu-v4": ("v4", 3, {"chip_config_name": "megacore"}),
        "tpu-v5e": ("v5e", 2, {}),
        "tpu-v5p": ("v5p", 3, {}),
        "tpu-v6e": ("v6e", 2, {}),
        "tpu-7x": ("tpu7x", 3, {}),
    }
)
"""A TPU's name in libtpu, how many dimensions its torus has, and what else it must be told."""

_CORES = MappingProxyType({"tpu-v3": 2, "tpu-7x": 2})
"""JAX devices of a chip, where it has several."""

_OFF_TPU = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
)
"""The variables that libtpu reads from the environment when it starts, in place of asking a server that only TPU
machines have; and that other processes may have it too, for nothing runs."""


def topology(cluster: str | os.PathLike[str] | Cluster) -> tuple[Device, ...]:
    """The devices of a cluster that need not be here, to compile for: `parallelize(step, cluster=c,
    devices=topology(c))`.

    Nothing runs on them. Raises DeviceError where the accelerator's compiler is not installed, has no such devices, or
    was not loaded: set JAX_PLATFORMS=cpu on a machine without accelerators.
    """
    described = cluster if isinstance(cluster, Cluster) else parse_cluster(cluster)
    kinds = {group.device.name for group in described.groups}
    (kind, *others) = sorted(kinds)
    platform = "gpu" if kind in GPU_TARGETS else "tpu" if kind in _TPUS else ""
    if others or not platform:
        rule = f"no compiler here knows {' with '.join(sorted(kinds))}"
        raise _unknown(described, rule, f"compile for one of {', '.join((*GPU_TARGETS, *_TPUS))}")
    module, packages, extra = EXTRAS[platform]
    if not _is_installed(module):
        rule = f"XLA's {platform.upper()} compiler comes with {packages}, not installed here"
        raise _unknown(described, rule, f"pip install 'autopar[{extra}]'; it runs on the CPU, with no accelerator")
    try:
        return _gpus(described, kind) if platform == "gpu" else _tpus(described, kind)
    except NotImplementedError as error:  # a RuntimeError, too
        rule = f"JAX started without XLA's {platform.upper()} compiler, as it found no such accelerator"
        remedy = "set JAX_PLATFORMS=cpu, or jax.config.update('jax_platforms', 'cpu'), before JAX is first used"
        raise _unknown(described, rule, remedy) from error
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise _unknown(described, f"{packages} has no such devices: {reason}", "compile for another size") from error


def cores_of(kind: str) -> int:
    """The JAX devices of a chip of this kind."""
    return _CORES.get(kind, 1)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _unknown(cluster: Cluster, rule: str, remedy: str) -> DeviceError:
    return DeviceError(explain(f"cluster {cluster.name!r}", rule, "", remedy))


def _gpus(cluster: Cluster, kind: str) -> tuple[Device, ...]:
    """The GPUs, one slice of hosts."""
    jax.devices()  # registers the plugins
    hosts = sum(group.hosts for group in cluster.groups)
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        target_config=GPU_TARGETS[kind].to_text_proto(),
        topology=f"1x{hosts}x{cluster.n_devices // hosts}",
    )
    return tuple(described.devices)


def _tpus(cluster: Cluster, kind: str) -> tuple[Device, ...]:
    """The cores of one slice of a pod, in libtpu's order."""
    for name, value in _OFF_TPU.items():
        os.environ.setdefault(name, value)
    jax.devices()
    name, rank, options = _TPUS[kind]
    chips = cluster.n_devices // cores_of(kind)
    extents = torus(chips, rank)
    small: Mapping[str, object] = {"chips_per_host_bounds": [*extents, 1, 1][:3]} if chips < 4 else {}
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{name}:{'x'.join(map(str, extents))}", **options, **small
    )
    if len(described.devices) != cluster.n_devices:
        raise ValueError(f"{len(described.devices)} devices where {cluster.n_devices} are asked for")
    return tuple(described.devices)


def torus(chips: int, rank: int) -> tuple[int, ...]:
    """The extents of the slice of a pod with so many chips, as near to a square or cube as powers of two allow.

    Raises ValueError for a number of chips that no slice has.
    """
    bits = chips.bit_length() - 1
    if chips != 1 << bits:
        raise ValueError(f"slices have a power of two of chips, not {chips:,}")
    if rank == 3 and chips <= 4:
        return (*torus(chips, 2), 1)
    return tuple(1 << (bits + place) // rank for place in range(rank))
