"""Rates at which one device computes and copies, from products of many shapes and dtypes while all devices work."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.api import parallelize
from autopar.jax_compat import Device
from autopar.rewrite import TracedStep
from autopar.tools.chains import Operation, apart_seconds, seconds
from passes.cluster import Cluster, DeviceSpec, HostGroup, Mesh
from passes.plan import Plan
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
"""The values that are tried for a device's `half_extent`, or `half_inner` of one whose cores take tiles: steps of a
fourth to a half, as no more is seen of it. Of the table's devices none has more than 512."""

CALLS = 64
"""Calls of a small program, one after another, whose time on the host is that of dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation on one device, to be measured and priced: its `kind` and `size` in words, and its array.

    `applied` takes the array and one of each of `weights`, which are shapes.
    """

    kind: str
    size: str
    applied: Callable[..., jax.Array]
    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    times: int = 4
    is_large: bool = False

    def weights_like(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Weights that leave values as large as they are."""
        nothing = x.ravel()[0] * 1e-6
        return tuple(jnp.full(w, 1 / w[-2], x.dtype) + nothing.astype(x.dtype) for w in self.weights)

    def step(self) -> TracedStep:
        """The operation as planners take it."""
        return parallelize(self.applied).step(*(jax.ShapeDtypeStruct(s, self.dtype) for s in self.shapes))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its array and weights."""
        return (self.shape, *self.weights)

    @property
    def least_nbytes(self) -> int:
        """The bytes that it cannot do without: array and weights read, and a result as large as the array written."""
        elements = sum(map(math.prod, self.shapes)) + math.prod(self.shape)
        return elements * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one operation, predicted by the measured cluster and measured; its `kind` and `size` in words.

    The cluster's numbers follow it where it `is_fitted`.
    """

    kind: str
    size: str
    predicted: float
    measured: float
    is_fitted: bool = True


def _product(rows: int, inner: int, columns: int, dtype: str) -> Case:
    """A product, and another one back to its shape if it changes that."""

    def applied(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for weight in weights:
            x = x @ weight
        return x

    return Case(
        kind=f"{dtype} products",
        size=f"{rows} x {inner} x {columns}",
        applied=applied,
        shape=(rows, inner),
        weights=((inner, columns), (columns, inner))[: 1 if columns == inner else 2],
        dtype=dtype,
    )


def _batched(batch: int, extent: int, dtype: str) -> Case:
    return Case(
        kind=f"{dtype} products",
        size=f"{batch} of {extent} x {extent} x {extent}",
        applied=lambda x: x @ x * (1 / extent),
        shape=(batch, extent, extent),
        dtype=dtype,
    )


def _experts(experts: int, rows: int, inner: int, columns: int, dtype: str) -> Case:
    """Products side by side with a weight each, and back to their shape."""
    return Case(
        kind=f"{dtype} products",
        size=f"{experts} of {rows} x {inner} x {columns}",
        applied=lambda x, w, v: x @ w @ v,
        shape=(experts, rows, inner),
        weights=((experts, inner, columns), (experts, columns, inner)),
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
        if dtype == "float32" and platform == "cpu":
            yield ROWS_LAST
            yield from CONVOLUTIONS
        yield _batched(32, large // 4, dtype)
        yield _experts(8, large // 16, large // 4, large, dtype)
    copied = COPIED.get(platform, MOST_COPIED)
    for elements in (copied, copied // 16):
        yield Case(
            kind="copies",
            size=f"{elements:,} elements",
            applied=lambda x: x * 1.0001 + 1e-4,
            shape=(elements,),
            is_large=elements == copied,
        )


TINY_CASE = Case(
    kind="float32 products",
    size=f"{TINY} x {TINY} x {TINY}",
    applied=lambda x: x @ x * 0.1,
    shape=(TINY, TINY),
    times=1024,
)
"""The least kernel, so often that its microseconds are seen beside those of a call."""

SUMS_LAST = _batched(512, 8, "float32")
ROWS_LAST = replace(
    SUMS_LAST, size=f"{SUMS_LAST.size}, rows last", applied=lambda x: jnp.einsum("bkm,bkn->bmn", x, x) * (1 / 8)
)
"""Small products side by side, whose left operand has last what is summed over, or its rows: the difference shows what
a call takes on a CPU."""


def _convolution(images: int, side: int, channels: int, window: int) -> Case:
    return Case(
        kind="convolutions",
        size=f"{images} of {side} x {side} x {channels}, {window} x {window}",
        applied=lambda x, weight: lax.conv_general_dilated(
            x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        shape=(images, side, side, channels),
        weights=((window, window, channels, channels),),
        times=16,
    )


PATCHES, CHANNELS, BETWEEN = _convolution(8, 16, 4, 7), _convolution(8, 8, 64, 3), _convolution(8, 16, 16, 3)
CONVOLUTIONS = PATCHES, CHANNELS, BETWEEN
"""Convolutions whose time is mostly that of putting patches together, and mostly that of multiplying them: of 8 devices
on 2 cores, 2.0 of 2.3 ms and 1.3 of 1.4 ms; and one between, which checks what the two say. Of seven others five, of 3
to 32 channels, were within 12 % of that; 3 x 3 of 2 and 3 channels took 1.3 and 1.4 times as long."""

_TURNS = 8
"""Times that either rate of convolutions follows the other: each is a tenth of the other's case, so that 3 would do."""

Timer = Callable[[Case], float]


def device_of(
    group: HostGroup, cluster: Cluster, devices: Sequence[Device], timer: Timer, floor: float, strided: float
) -> tuple[DeviceSpec, tuple[Sample, ...]]:
    """The device whose rates explain what `timer` says of each case, and how well; `floor` is the least of a kernel."""
    several = tuple(cases(devices[0].platform))
    called = max(0.0, timer(ROWS_LAST) - timer(SUMS_LAST)) if ROWS_LAST in several else 0.0
    seen = replace(
        group.device,
        dispatch_seconds=_dispatch_seconds(devices),
        source="measured by autopar.measure",
        strided_bytes_per_second=4 * LONG * WIDE / strided if strided > 0 else 0.0,
        product_seconds=called / ROWS_LAST.shape[0],
    )
    return fitted_device(replace(group, device=seen), cluster, several, timer, floor)


def fitted_device(
    group: HostGroup,
    cluster: Cluster,
    several: Sequence[Case],
    timer: Timer,
    floor: float,
    is_fitted: Callable[[Case, float], bool] = lambda case, seconds: True,
    halves: Sequence[float] = HALVES,
) -> tuple[DeviceSpec, tuple[Sample, ...]]:
    """The group's device with the rates that explain what `timer` says of each of several cases, and how well.

    What `is_fitted` denies of a case and its seconds is predicted like the others, but the fit does not follow it.
    """
    measured = {id(case): timer(case) for case in several}
    fits = {id(case): case is not BETWEEN and is_fitted(case, measured[id(case)]) for case in several}
    steps = {id(case): case.step() for case in several}
    copied = next(case for case in several if case.kind == "copies" and case.is_large)
    nbytes = 2 * 4 * math.prod(copied.shape)
    base = replace(
        group.device,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        memory_bytes_per_second=nbytes / max(measured[id(copied)] - floor, 1e-9),
        launch_seconds=floor,
        convolution_efficiency=1.0,
        pixel_seconds=0.0,
    )

    def priced(device: DeviceSpec, case: Case) -> float:
        return predicted_seconds(steps[id(case)], replace(cluster, groups=(replace(group, device=device),)))

    shape = half_of(base)

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

    products = [case for case in several if case.kind == "float32 products" and (case.is_large or fits[id(case)])]

    def error(device: DeviceSpec) -> float:
        """The mean squared error of products in float32, on a logarithmic scale."""
        return statistics.fmean(math.log(priced(device, case) / measured[id(case)]) ** 2 for case in products)

    device = min(map(fitted, halves), key=error)
    if PATCHES in several:
        device = _convolving(device, measured, priced)
    samples = tuple(_sample(case, priced(device, case), measured[id(case)], fits[id(case)]) for case in several)
    return device, samples


def _convolving(
    device: DeviceSpec, measured: Mapping[int, float], priced: Callable[[DeviceSpec, Case], float]
) -> DeviceSpec:
    """The device whose rates explain what `PATCHES` and `CHANNELS` take, each of the other rate's number in turn."""
    floor = device.launch_seconds
    for _ in range(_TURNS):
        plain = priced(replace(device, pixel_seconds=0.0), PATCHES)
        each = priced(replace(device, pixel_seconds=1.0), PATCHES) - plain
        device = replace(device, pixel_seconds=max(0.0, measured[id(PATCHES)] - plain) / each)
        product = replace(device, pixel_seconds=0.0, convolution_efficiency=1.0)
        beyond = priced(device, CHANNELS) - priced(replace(device, pixel_seconds=0.0), CHANNELS)
        spent = max(measured[id(CHANNELS)] - beyond - floor, 1e-9)
        device = replace(device, convolution_efficiency=max(priced(product, CHANNELS) - floor, 1e-9) / spent)
    return device


def _sample(case: Case, predicted: float, measured: float, is_fitted: bool) -> Sample:
    return Sample(kind=case.kind, size=case.size, predicted=predicted, measured=measured, is_fitted=is_fitted)


def half_of(device: DeviceSpec) -> Literal["half_inner", "half_extent"]:
    """The name of the number that says how much small extents slow a device's products."""
    return "half_inner" if device.cores else "half_extent"


def predicted_seconds(step: TracedStep, cluster: Cluster) -> float:
    """The seconds of a step on one device of a cluster."""
    return single_plan(step, cluster).step_seconds


def single_plan(step: TracedStep, cluster: Cluster) -> Plan:
    """The plan of a step on one device of a cluster."""
    alone = replace(cluster.group(), hosts=1, devices_per_host=1, measured=())
    return cast("Plan", DataParallel().plan(step, replace(cluster, groups=(alone,)), PlanOptions()).plan)


def timer_of(mesh: Mesh, devices: Sequence[Device]) -> Timer:
    """The seconds of a case while all devices of a mesh compute it; copies are of arrays that no cache holds.

    Those of accelerators are too large for one anyway.
    """

    def timed(case: Case) -> float:
        if case.kind == "copies" and devices[0].platform == "cpu":
            return apart_seconds(case.applied, case.shape, mesh, devices)
        return seconds(
            case.applied, case.shape, mesh, devices, times=case.times, dtype=case.dtype, others=case.weights_like
        )

    return timed


def floor_seconds(mesh: Mesh, devices: Sequence[Device]) -> float:
    """The seconds of the least kernel."""
    return seconds(TINY_CASE.applied, TINY_CASE.shape, mesh, devices, times=TINY_CASE.times)


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
