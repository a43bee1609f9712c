"""The cluster of this machine, with numbers that are measured rather than read off a data sheet.

Virtual CPU devices share cores, caches and a transport that behaves unlike any accelerator's, so what a plan costs
there is learned from a minute of products, copies and collectives, every device at work at once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.jax_compat import Device
from autopar.lowering import device_mesh
from passes.cluster import Cluster, DeviceSpec, HostGroup, Kind, Measured, Mesh, local_cluster

_REPEATS = 5
_NBYTES = (1 << 12, 1 << 17, 1 << 20, 1 << 22)
"""Payloads of a collective, from where latency rules to where bandwidth does."""

_TINY, _LARGE, _COPIED = 8, 512, 1 << 20
"""Rows of the products that show the floor and the rate, and elements of an array that no cache holds."""

_BATCH, _SMALL = 512, 8
"""Number and extents of the products that show what small extents cost."""

_LONG, _WIDE = 1024, 128
"""Rows and columns of an array that is gathered and scattered along either dimension."""

_Step = Callable[[jax.Array], jax.Array]
_Announce = Callable[[str], None]


def measure(devices: Sequence[Device] | None = None, *, announce: _Announce = lambda what: None) -> Cluster:
    """The cluster of these devices (by default all of this process), measured in about a minute.

    `announce` hears in words what is measured next. Raises ClusterError as `local_cluster` does.
    """
    devices = tuple(jax.local_devices() if devices is None else devices)
    cluster = local_cluster(devices)
    group = cluster.group()
    announce("products and copies")
    measured = [
        measurement
        for ranks in _divisors(len(devices))
        for measurement in _collectives(cluster, devices, ranks, announce)
    ]
    device = _device(group, cluster, devices)
    return replace(
        cluster,
        name=f"{cluster.name}, measured",
        groups=(replace(group, device=device, measured=tuple(measured)),),
    )


def _divisors(n: int) -> Iterator[int]:
    return (ranks for ranks in range(2, n + 1) if n % ranks == 0)


def _device(group: HostGroup, cluster: Cluster, devices: Sequence[Device]) -> DeviceSpec:
    """The device's rates of computing and copying while the others work too."""
    mesh = Mesh(axes=("d",) if len(devices) > 1 else (), sizes=(len(devices),) * (len(devices) > 1), cluster=cluster)
    floor = _seconds(lambda x: x @ x * 0.1, (_TINY, _TINY), mesh, devices)
    rates: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        spent = _seconds(lambda x: x @ x * 1e-3, (_LARGE, _LARGE), mesh, devices, times=4, dtype=dtype)
        rates[dtype] = 2 * _LARGE**3 / max(spent - floor, 1e-9)
    small = _seconds(lambda x: x @ x * 0.1, (_BATCH, _SMALL, _SMALL), mesh, devices)
    slowdown = rates["float32"] * max(small - floor, 1e-9) / (2 * _BATCH * _SMALL**3)
    copied = _seconds(lambda x: jnp.roll(x, 1) * 1.0001, (_COPIED,), mesh, devices, times=4)
    strided = _strided_seconds(mesh, devices) if len(devices) > 1 else 0.0
    return replace(
        group.device,
        flops_per_second=rates,
        matmul_efficiency=1.0,
        memory_bytes_per_second=2 * 4 * _COPIED / max(copied - floor, 1e-9),
        launch_seconds=floor,
        source="measured by autopar.measure",
        strided_bytes_per_second=4 * _LONG * _WIDE / strided if strided > 0 else 0.0,
        half_extent=_SMALL * max(slowdown ** (1 / 3) - 1, 0.0),
    )


def _strided_seconds(mesh: Mesh, devices: Sequence[Device]) -> float:
    """The seconds that one collective takes longer along the second dimension than along the first.

    Between products, that is: alone, a compiler would lay the array out as the collective likes it.
    """
    weights = np.full((_WIDE, _WIDE), 1e-3, np.float32)

    def there_and_back(dim: int) -> _Step:
        return lambda x: lax.all_gather(
            lax.psum_scatter(x @ weights, "d", scatter_dimension=dim, tiled=True), "d", axis=dim, tiled=True
        )

    leading, trailing = (_seconds(there_and_back(dim), (_LONG, _WIDE), mesh, devices) for dim in (0, 1))
    return (trailing - leading) / 2


def _collectives(cluster: Cluster, devices: Sequence[Device], ranks: int, announce: _Announce) -> Iterator[Measured]:
    """The measurements of every kind of collective among groups of `ranks` neighbours."""
    rows = len(devices) // ranks
    sizes = {"g": rows, "r": ranks} if rows > 1 else {"r": ranks}
    mesh = Mesh(axes=tuple(sizes), sizes=tuple(sizes.values()), cluster=cluster)
    for kind, (step, alone, shrink) in _steps(ranks).items():
        announce(f"{kind} among {ranks}")
        spent: list[float] = []
        for nbytes in _NBYTES:
            shape = (nbytes // 4 // shrink,)
            with_collective, local = _seconds(step, shape, mesh, devices), _seconds(alone, shape, mesh, devices)
            spent.append(max(with_collective - local, with_collective / 2))
        alpha, beta = _line(np.array(_NBYTES, float), np.array(spent))
        yield Measured(kind=kind, ranks=ranks, alpha_seconds=alpha, bytes_per_second=1 / beta)


def _steps(ranks: int) -> dict[Kind, tuple[_Step, _Step, int]]:
    """Each kind as a step that can follow itself, the same without its collective, and payload over operand."""
    around = [(i, (i + 1) % ranks) for i in range(ranks)]

    def cut(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, lax.axis_index("r") * (x.size // ranks), x.size // ranks)

    return {
        "all_reduce": (lambda x: lax.psum(x, "r") * (1 / ranks), lambda x: x * (1 / ranks), 1),
        "all_gather": (
            lambda x: cut(lax.all_gather(x, "r", tiled=True)) * 0.9,
            lambda x: cut(jnp.tile(x, ranks)) * 0.9,
            ranks,
        ),
        "reduce_scatter": (
            lambda x: jnp.tile(lax.psum_scatter(x, "r", tiled=True) * 0.1, ranks),
            lambda x: jnp.tile(cut(x) * 0.1, ranks),
            1,
        ),
        "all_to_all": (lambda x: lax.all_to_all(x, "r", 0, 0, tiled=True) * 0.9, lambda x: x * 0.9, 1),
        "permute": (lambda x: lax.ppermute(x, "r", around) * 0.9, lambda x: x * 0.9, 1),
    }


def _seconds(
    step: _Step, shape: tuple[int, ...], mesh: Mesh, devices: Sequence[Device], times: int = 16, dtype: Any = "float32"
) -> float:
    """Median seconds of one step of a chain, run by every device on its own array."""
    clock, cores = _clock(devices)

    def chain(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, y: step(y).astype(y.dtype), x)

    if mesh.axes:
        real, spec = device_mesh(mesh, devices), PartitionSpec(mesh.axes)
        chain = jax.shard_map(chain, mesh=real, in_specs=spec, out_specs=spec, check_vma=False)
        full_shape = (shape[0] * mesh.size, *shape[1:])
        x = jax.device_put(jnp.full(full_shape, 0.5, dtype), NamedSharding(real, spec))
    else:
        x = jax.device_put(jnp.full(shape, 0.5, dtype), devices[0])
    run = jax.jit(chain)
    run(x).block_until_ready()
    spent: list[float] = []
    for _ in range(_REPEATS):
        start = clock()
        run(x).block_until_ready()
        spent.append((clock() - start) / cores / times)
    return statistics.median(spent)


def _clock(devices: Sequence[Device]) -> tuple[Callable[[], float], int]:
    """The clock to time by, and the number to divide its seconds by.

    Virtual CPU devices are kept busy by this process's threads, so the processor time that these take, over the cores,
    is what a step takes where nothing else runs, and other programs do not spoil it.
    """
    if devices[0].platform != "cpu" or len(devices) == 1:
        return time.perf_counter, 1
    return time.process_time, min(os.cpu_count() or 1, len(devices))


def _line(nbytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """(seconds at 0 bytes, seconds a byte), fitted for the least relative error."""
    weighted = np.stack([1 / seconds, nbytes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=None)[0]
    if alpha <= 0:
        alpha, beta = 0.0, float(np.median(seconds / nbytes))
    return float(alpha), max(float(beta), 1e-15)
