"""Rates at which one device computes and copies, from products of many shapes and dtypes while all devices work."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.api import parallelize
from autopar.jax_compat import Device
from autopar.rewrite import TracedStep
from autopar.tools.chains import Operation, seconds
from passes.cluster import Cluster, DeviceSpec, HostGroup, Mesh
from passes.planners import DataParallel, PlanOptions

DTYPES = ("float32", "bfloat16")

TINY = 8
"""Rows of the product that shows the floor: what it computes takes no time on any device."""

LARGE = {"cpu": 512}
LARGEST = 4096
"""Rows of the largest product by platform, 4096 on accelerators: large enough for the best rate, over in seconds."""

COPIED = {"cpu": 1 << 20}
MOST_COPIED = 1 << 27
"""Elements of the largest array that is copied, which no cache holds: 4 MiB here, 512 MiB on accelerators."""

LONG, WIDE = 1024, 128
"""Rows and columns of an array that is gathered and scattered along either dimension."""

HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""What is tried for a device's `half_extent`, or `half_inner` of one whose cores take tiles: steps of a fourth to a
half, as no more is seen of it. Of the table's devices none has more than 512."""

CALLS = 64
"""Of a small program, one after another, whose time on the host is that of dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation on one device, to be measured and priced: its `kind` and `size` in words, and its array."""

    kind: str
    size: str
    operation: Operation
    shape: tuple[int, ...]
    dtype: str = "float32"
    times: int = 4
    is_large: bool = False

    def step(self) -> TracedStep:
        """The operation as planners take it."""
        return parallelize(self.operation).step(jax.ShapeDtypeStruct(self.shape, self.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one operation, predicted by the measured cluster and measured; its `kind` and `size` in words."""

    kind: str
    size: str
    predicted: float
    measured: float


def _product(rows: int, inner: int, columns: int, dtype: str) -> Case:
    """A product, and another one back to its shape if it changes that."""
    there = np.full((inner, columns), 1 / inner, np.float32)
    back = np.full((columns, inner), 1 / columns, np.float32)

    def operation(x: jax.Array) -> jax.Array:
        y = x @ jnp.asarray(there, x.dtype)
        return y if columns == inner else y @ jnp.asarray(back, x.dtype)

    size = f"{rows} x {inner} x {columns}"
    return Case(kind=f"{dtype} products", size=size, operation=operation, shape=(rows, inner), dtype=dtype)


def _batched(batch: int, extent: int, dtype: str) -> Case:
    return Case(
        kind=f"{dtype} products",
        size=f"{batch} of {extent} x {extent} x {extent}",
        operation=lambda x: x @ x * (1 / extent),
        shape=(batch, extent, extent),
        dtype=dtype,
    )


def cases(platform: str) -> Iterator[Case]:
    """The products, copies and reductions that are measured."""
    large = LARGE.get(platform, LARGEST)
    for dtype in DTYPES:
        yield replace(_product(large, large, large, dtype), is_large=True)
        yield _product(large // 4, large // 4, large // 4, dtype)
        yield _product(large // 16, large, large, dtype)
        yield _product(large, large // 16, large, dtype)
        yield _product(4 * large, large // 4, large // 16, dtype)
        yield _batched(large, 8, dtype)
        yield _batched(32, large // 4, dtype)
    copied = COPIED.get(platform, MOST_COPIED)
    for elements in (copied, copied // 16):
        yield Case(
            kind="copies",
            size=f"{elements:,} elements",
            operation=lambda x: x * 1.0001 + 1e-4,
            shape=(elements,),
            is_large=elements == copied,
        )


Timer = Callable[[Case], float]


def device_of(
    group: HostGroup, cluster: Cluster, devices: Sequence[Device], timer: Timer, floor: float, strided: float
) -> tuple[DeviceSpec, tuple[Sample, ...]]:
    """The device whose rates explain what `timer` says of each case, and how well; `floor` is the least of a kernel."""
    several = list(cases(devices[0].platform))
    measured = {id(case): timer(case) for case in several}
    steps = {id(case): case.step() for case in several}
    copied = next(case for case in several if case.kind == "copies" and case.is_large)
    nbytes = 2 * 4 * math.prod(copied.shape)
    base = replace(
        group.device,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        memory_bytes_per_second=nbytes / max(measured[id(copied)] - floor, 1e-9),
        launch_seconds=floor,
        dispatch_seconds=_dispatch_seconds(devices),
        source="measured by autopar.measure",
        strided_bytes_per_second=4 * LONG * WIDE / strided if strided > 0 else 0.0,
    )

    def priced(device: DeviceSpec, case: Case) -> float:
        return predicted_seconds(steps[id(case)], replace(cluster, groups=(replace(group, device=device),)))

    shape = "half_inner" if base.cores else "half_extent"

    def fitted(half: float) -> DeviceSpec:
        """The device with that half whose largest products take what they were measured to take."""
        halved = replace(base, **{shape: half})
        rates: dict[str, float] = {}
        for dtype in DTYPES:
            case = next(case for case in several if case.dtype == dtype and case.is_large and case is not copied)
            spent = max(measured[id(case)] - floor, 1e-9)
            guess = replace(halved, flops_per_second={dtype: 2 * case.shape[0] ** 3 / spent})
            rates[dtype] = guess.flops_per_second[dtype] * max(priced(guess, case) - floor, 1e-9) / spent
        return replace(halved, flops_per_second=rates)

    products = [case for case in several if case.kind == "float32 products"]

    def error(device: DeviceSpec) -> float:
        """The mean squared error of products in float32, on a logarithmic scale."""
        return statistics.fmean(math.log(priced(device, case) / measured[id(case)]) ** 2 for case in products)

    device = min(map(fitted, HALVES), key=error)
    samples = tuple(
        Sample(kind=case.kind, size=case.size, predicted=priced(device, case), measured=measured[id(case)])
        for case in several
    )
    return device, samples


def predicted_seconds(step: TracedStep, cluster: Cluster) -> float:
    """The seconds of a step on one device of a cluster."""
    alone = replace(cluster.group(), hosts=1, devices_per_host=1, measured=())
    return DataParallel().plan(step, replace(cluster, groups=(alone,)), PlanOptions()).plan.step_seconds


def timer_of(mesh: Mesh, devices: Sequence[Device]) -> Timer:
    """The seconds of a case while all devices of a mesh compute it."""
    return lambda case: seconds(case.operation, case.shape, mesh, devices, times=case.times, dtype=case.dtype)


def floor_seconds(mesh: Mesh, devices: Sequence[Device]) -> float:
    """The seconds of the least kernel."""
    return seconds(lambda x: x @ x * 0.1, (TINY, TINY), mesh, devices)


def strided_seconds(mesh: Mesh, devices: Sequence[Device]) -> float:
    """The seconds that one collective takes longer along the second dimension than along the first.

    Between products, that is: alone, a compiler would lay the array out as the collective likes it.
    """
    weights = np.full((WIDE, WIDE), 1e-3, np.float32)

    def there_and_back(dim: int) -> Operation:
        return lambda x: lax.all_gather(
            lax.psum_scatter(x @ weights, "d", scatter_dimension=dim, tiled=True), "d", axis=dim, tiled=True
        )

    leading, trailing = (seconds(there_and_back(dim), (LONG, WIDE), mesh, devices) for dim in (0, 1))
    return (trailing - leading) / 2


def _dispatch_seconds(devices: Sequence[Device]) -> float:
    """Median seconds that the host takes to start a small program on half of the devices, as on a stage of two.

    It is the processor time of the thread that starts it, which other programs do not spoil.
    """
    half = devices[: max(1, len(devices) // 2)]
    mesh = jax.sharding.Mesh(np.array(half), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.device_put(np.zeros((len(half),), np.float32), sharding)
    run = jax.jit(lambda x: x + 1).lower(x).compile()
    jax.block_until_ready(run(x))
    spent: list[float] = []
    for _ in range(CALLS):
        start = time.thread_time()
        result = run(x)
        spent.append(time.thread_time() - start)
        jax.block_until_ready(result)
    return statistics.median(spent)
