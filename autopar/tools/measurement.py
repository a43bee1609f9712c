"""A cluster of this machine's devices, with measured numbers in place of a data sheet's.

Virtual CPU devices share cores, caches and a transport that behaves unlike any accelerator's, so costs there are
learned from a minute of products, copies and collectives, with every device at work at once.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from autopar.jax_compat import Device
from autopar.options import checked_devices
from autopar.tools import device_sweep, parallel_steps, whole_steps
from autopar.tools.chains import ROUNDS, TINY, Chain, Operation, between_products, multiplied, seconds
from autopar.tools.device_sweep import Sample
from passes.cluster import CPU, Cluster, DeviceSpec, Kind, Measured, Mesh, collectives, local_cluster
from passes.text import nbytes as written_nbytes

NBYTES = (1 << 12, 1 << 17, 1 << 20, 1 << 22)
"""Payloads of a collective, from where latency rules to where bandwidth does."""

SHORT = 32
"""Bytes of a collective that takes what its start takes, as sums of losses and statistics do."""

LEAST = 0.2
"""The least share of a product and a collective after it that the collective is said to take, where noise hides it:
the least of what `autopar measure` sends takes 0.35 to 0.6 of both (8 devices on 2 cores)."""

_NO_BETA = 1e-15
"""Seconds a byte where more bytes took no longer: a gigabyte in a microsecond."""

OVERLAPPED = 1 << 20
"""Elements of the array that is reduced while something is multiplied: 4 MiB, as a bucket of gradients."""

Progress = Callable[[str], None]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The cluster, and how well it explains what it was made of.

    `overlap` is the share of an all-reduce that is hidden behind products that do not need it, of the shorter of both;
    None on one device. Accelerators have it as their `collective_overlap`.
    """

    cluster: Cluster
    samples: tuple[Sample, ...]
    overlap: float | None


def measure(
    devices: Sequence[Device] | None = None, *, announce: Progress = lambda what: None, said: Progress | None = None
) -> Cluster:
    """The cluster of these devices (by default all of this process), measured in one to two minutes.

    `announce` is told, as text, what is measured next; `said` is its former name, and deprecated. Raises ClusterError
    for devices of several kinds, of a kind that is not in the table, or with different numbers on the hosts.
    """
    if said is not None:
        warnings.warn("measure(said=) is deprecated: write measure(announce=)", DeprecationWarning, stacklevel=2)
    return measurement(devices, announce=said or announce).cluster


def measurement(devices: Sequence[Device] | None = None, *, announce: Progress = lambda what: None) -> Measurement:
    """The measurement that `measure` makes, with each sample beside the cluster's prediction of it."""
    devices = checked_devices(devices) or tuple(jax.local_devices())
    cluster = local_cluster(devices)
    group = cluster.group()
    whole = Mesh(axes=("d",) if len(devices) > 1 else (), sizes=(len(devices),) * (len(devices) > 1), cluster=cluster)
    announce("products and copies")
    strided = device_sweep.strided_seconds(whole, devices) if len(devices) > 1 else 0.0
    floor = device_sweep.floor_seconds(whole, devices)
    timer = device_sweep.timer_of(whole, devices)
    device, samples = device_sweep.device_of(group, cluster, devices, timer, floor, strided)
    # Behind products, not before: right after collectives, large products were seen at half their rate.
    curves = list(_curves(cluster, devices, announce))
    announce("overlap")
    overlap = _overlap(whole, devices) if len(devices) > 1 else None
    measured = tuple(line for curve in curves for line in curve.lines)
    device = with_overlap(device, overlap)
    seen = replace(group, device=device, measured=measured)
    result = replace(cluster, name=f"{cluster.name}, measured", groups=(seen,))
    announce("training steps")
    result, whole_samples = whole_steps.slowed(result, whole, devices)
    sent = tuple(sample for curve in curves for sample in curve.samples(result))
    announce("training steps, data parallel")
    result, parallel_samples = parallel_steps.with_waits(result, whole, devices)
    several = (*samples, *whole_samples, *parallel_samples, *sent)
    return Measurement(cluster=result, samples=several, overlap=overlap)


def with_overlap(device: DeviceSpec, overlap: float | None) -> DeviceSpec:
    """The device with what it hides of collectives behind computing.

    Virtual CPU devices hide nothing: they share cores, so a collective's own work takes the time of somebody's product,
    and what two of them seem to hide of it is the time that they wait for each other in turn.
    """
    return device if overlap is None or device.name == CPU else replace(device, collective_overlap=overlap)


def _divisors(n: int) -> Iterator[int]:
    return (ranks for ranks in range(2, n + 1) if n % ranks == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """Seconds of one kind of collective among `mesh`'s axis `r` by bytes, and the lines through them."""

    lines: tuple[Measured, ...]
    kind: Kind
    mesh: Mesh
    seconds: tuple[float, ...]

    def samples(self, cluster: Cluster) -> Iterator[Sample]:
        """Each point beside what a cluster predicts of it."""
        group = replace(self.mesh, cluster=cluster).group(("r",))
        for nbytes, spent in zip(NBYTES, self.seconds, strict=True):
            predicted = collectives.seconds(self.kind, float(nbytes), group)
            size = f"{written_nbytes(nbytes)} among {self.lines[0].ranks}"
            yield Sample(kind=self.kind, size=size, predicted=predicted, measured=spent)


def _scaled(x: jax.Array) -> jax.Array:
    """The work around most collectives, which takes as long among however many devices."""
    return x * 0.9


def _nothing(matrix: jax.Array) -> jax.Array:
    return matrix


def _crossing(matrix: jax.Array) -> jax.Array:
    """A product, and one number summed over the groups' neighbours."""
    return multiplied(matrix) + lax.psum(matrix[0, 0], "g") * TINY


def _curves(cluster: Cluster, devices: Sequence[Device], announce: Progress) -> Iterator[_Curve]:
    """The measurements of every kind of collective among groups of every number of devices that divides all."""
    chains = _Chains(devices=devices)
    sweeps = [_Sweep.of(cluster, len(devices), ranks) for ranks in _divisors(len(devices))]
    for sweep in sweeps:
        for kind in sweep.steps:
            announce(f"{kind} among {sweep.ranks}")
            sweep.begin(kind, chains)
    for number in range(2, ROUNDS + 1):
        announce(f"collectives, round {number} of {ROUNDS}")
        for chain in chains.begun.values():
            chain.go_on()
    for sweep in sweeps:
        yield from sweep.curves(chains)


Before = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chains:
    """Chains of collectives, and of what stands around them, by operation, what comes before it, and bytes."""

    devices: Sequence[Device]
    begun: dict[tuple[Operation, Before, int], Chain] = field(
        default_factory=dict[tuple[Operation, Before, int], Chain]
    )

    def begin(self, operation: Operation, before: Before, nbytes: int, mesh: Mesh) -> None:
        """Compiles a chain, unless it is there, and runs its first round."""
        key = operation, before, nbytes
        if key not in self.begun:
            self.begun[key] = between_products(operation, nbytes // 4, mesh, self.devices, before)
            self.begun[key].go_on()

    def seconds(self, operation: Operation, before: Before, nbytes: int) -> float:
        """Seconds of one operation, and of what stands around it."""
        return self.begun[operation, before, nbytes].seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """Every kind of collective among groups of `ranks` neighbours, along a mesh's axis `r`.

    Several groups would drift apart, each at its own collectives, as none does in a program: that has others along the
    mesh's other axes. So each collective comes in turn with a short one across the groups, whose time is known from two
    short ones in turn: among 2 and 4 of 8 devices on 2 cores these take 1.6 to 2 times as long as either alone. Short
    ones of every kind take as long among virtual CPU devices, where each is a meeting of threads: what one run has them
    differ by, another has not, and a search would choose by it.
    """

    ranks: int
    mesh: Mesh
    steps: dict[Kind, tuple[Operation, Operation]]

    @staticmethod
    def of(cluster: Cluster, n_devices: int, ranks: int) -> _Sweep:
        """The sweep of so many neighbours of so many devices."""
        rows = n_devices // ranks
        sizes = {"g": rows, "r": ranks} if rows > 1 else {"r": ranks}
        mesh = Mesh(axes=tuple(sizes), sizes=tuple(sizes.values()), cluster=cluster)
        return _Sweep(ranks=ranks, mesh=mesh, steps=_steps(ranks))

    @property
    def before(self) -> tuple[Before, Before]:
        """The work before a collective, and before what stands around one."""
        return (_nothing, _nothing) if len(self.mesh.axes) == 1 else (_crossing, multiplied)

    def begin(self, kind: Kind, chains: _Chains) -> None:
        """Compiles and begins the chains of one kind."""
        crosses = kind == "all_reduce" and len(self.mesh.axes) > 1
        for nbytes in (*NBYTES, SHORT) if crosses else NBYTES:
            for operation, before in zip(self.steps[kind], self.before, strict=True):
                chains.begin(operation, before, nbytes, self.mesh)

    def _spent(self, kind: Kind, nbytes: int, chains: _Chains) -> float:
        """Seconds of a collective, and of the one across groups if there are several."""
        both, around = (chains.seconds(*each, nbytes) for each in zip(self.steps[kind], self.before, strict=True))
        return max(both - around, LEAST * both / len(self.mesh.axes))  # of as many products

    def curves(self, chains: _Chains) -> Iterator[_Curve]:
        """The lines through what was measured, of each kind."""
        crossing = self._spent("all_reduce", SHORT, chains) / 2 if len(self.mesh.axes) > 1 else 0.0
        seconds_of = dict[Kind, list[float]]()
        for kind in self.steps:
            totals = [self._spent(kind, nbytes, chains) for nbytes in NBYTES]
            seconds_of[kind] = [max(total - crossing, total / 2) for total in totals]
        meeting = statistics.median(several[0] for several in seconds_of.values())
        for kind, several in seconds_of.items():
            first = meeting if self.mesh.cluster.group().device.name == CPU else several[0]
            lines = tuple(
                Measured(kind=kind, ranks=self.ranks, alpha_seconds=alpha, bytes_per_second=1 / beta)
                for alpha, beta in lines_through(np.array(NBYTES, float), np.array([first, *several[1:]]))
            )
            yield _Curve(lines=lines, kind=kind, mesh=self.mesh, seconds=tuple(several))


def _overlap(mesh: Mesh, devices: Sequence[Device]) -> float:
    """The share of the shorter of an all-reduce and a product that is hidden where neither needs the other."""
    extent = device_sweep.LARGE.get(devices[0].platform, device_sweep.LARGEST)
    product = extent * extent

    def reduced(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:product], lax.psum(x[product:], "d") * (1 / mesh.size)])

    def multiplied(x: jax.Array) -> jax.Array:
        square = x[:product].reshape(extent, extent)
        return jnp.concatenate([(square @ square).ravel() * (1 / extent), x[product:]])

    def both(x: jax.Array) -> jax.Array:
        square = x[:product].reshape(extent, extent)
        summed = lax.psum(x[product:], "d") * (1 / mesh.size)
        return jnp.concatenate([(square @ square).ravel() * (1 / extent), summed])

    shape = (product + OVERLAPPED,)
    neither = seconds(lambda x: jnp.concatenate([x[:product] * 0.9, x[product:] * 0.9]), shape, mesh, devices, times=2)
    spent = [seconds(step, shape, mesh, devices, times=2) for step in (reduced, multiplied, both)]
    return hidden(*(max(each - neither, 0.0) for each in spent))


def hidden(first: float, second: float, both: float) -> float:
    """The share of the shorter of two that is hidden where both take so long together: 0 one by one, 1 at once."""
    shorter = min(first, second)
    return min(1.0, max(0.0, (first + second - both) / shorter)) if shorter > 0 else 0.0


def _steps(ranks: int) -> dict[Kind, tuple[Operation, Operation]]:
    """Each kind as a step that can follow itself, and the same without its collective."""
    around = [(i, (i + 1) % ranks) for i in range(ranks)]

    def cut(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, lax.axis_index("r") * (x.size // ranks), x.size // ranks)

    return {
        "all_reduce": (lambda x: lax.psum(x, "r") * (1 / ranks), _scaled),
        "all_gather": (
            lambda x: lax.all_gather(cut(x), "r", tiled=True) * 0.9,
            lambda x: jnp.tile(cut(x), ranks) * 0.9,
        ),
        "reduce_scatter": (
            lambda x: jnp.tile(lax.psum_scatter(x, "r", tiled=True) * 0.1, ranks),
            lambda x: jnp.tile(cut(x) * 0.1, ranks),
        ),
        "all_to_all": (lambda x: lax.all_to_all(x, "r", 0, 0, tiled=True) * 0.9, _scaled),
        "permute": (lambda x: lax.ppermute(x, "r", around) * 0.9, _scaled),
    }


def lines_through(nbytes: Floats, seconds: Floats) -> list[tuple[float, float]]:
    """The lines (seconds at 0 bytes, seconds a byte) of which the highest is nearest to what was measured: one through
    all, or one through the first half and one through the rest.
    """
    half = len(nbytes) // 2
    whole = [_line(nbytes, seconds)]
    halves = [_line(nbytes[:half], seconds[:half]), _line(nbytes[half:], seconds[half:])]
    return min(whole, halves, key=lambda lines: _error(lines, nbytes, seconds))


def _line(nbytes: Floats, seconds: Floats) -> tuple[float, float]:
    """(seconds at 0 bytes, seconds a byte) of the line through two points that is nearest to all of them; neither is
    less than nothing.

    One through all, of least squares, goes a half or a third too low where noise makes one of four points so.
    """
    lines = [(0.0, float(np.median(seconds / nbytes))), (float(np.median(seconds)), _NO_BETA)]
    for (first, early), (last, late) in itertools.combinations(zip(nbytes, seconds, strict=True), 2):
        beta = (late - early) / (last - first)
        if beta > 0 and (alpha := early - beta * first) > 0:
            lines.append((float(alpha), float(beta)))
    return min(lines, key=lambda line: _error([line], nbytes, seconds))


def _error(lines: Sequence[tuple[float, float]], nbytes: Floats, seconds: Floats) -> float:
    """The distance of the highest of some lines from what was measured: logarithms of the ratios, added up."""
    highest = np.maximum.reduce([alpha + beta * nbytes for alpha, beta in lines])
    return float(np.abs(np.log(highest / seconds)).sum())
