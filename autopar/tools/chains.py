"""Seconds of one operation, from a chain of it that every device runs at once on its own array."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.jax_compat import Device
from autopar.lowering import device_mesh
from passes.cluster import Mesh

REPEATS, FEWER = 5, 3
"""Runs of a chain, of which the fastest counts: what disturbs one can only lengthen it. Fewer of a long one."""

TYPICAL = 15
"""Runs of a chain of collectives, of which the median counts: how threads meet is as often one way as another. Of 16
sums among 4 of 8 devices on 2 cores the fastest run took a third of the median, which is what programs see."""

LONG_SECONDS = 0.1
"""A run so long is many times the slice of an operating system's scheduler: runs of one chain were within 10 % of each
other, those of shorter ones within 30 % (8 devices on 2 cores beside other programs)."""

LONGER = 3
"""A chain is run so many times as long, too, and the difference is that of the operations: a call by itself takes as
long as many small ones."""

ARRAYS, FEWEST_ARRAYS = 16, 4
HELD_NBYTES = 1 << 24
"""Arrays that a copy or collective is measured on in turn: as many as hold this together, 128 MiB on 8 devices, which
few caches do. Of small ones, which may stay in a cache as in a program, so many and no more."""

WORK = 64
"""Rows and columns of the matrix that is multiplied by itself between two collectives: 36 us of 8 devices on 2 cores,
enough for threads to part, and little enough that what is left of both is the collective. Measured twice, short
collectives differ by 30 %, and with 128 rows, 0.2 ms, by a factor of 2.7."""

TINY = 1e-6
"""Makes a product wait for a collective, and the next collective for it, and changes neither by much."""

Operation = Callable[..., jax.Array]
"""From an array, and others that stay the same, to one of the first one's shape and dtype."""

Others = Callable[[jax.Array], tuple[jax.Array, ...]]
"""What an operation takes beside the array, made from the first one: no constants, which a compiler would arrange."""


def seconds(
    operation: Operation,
    shape: tuple[int, ...],
    mesh: Mesh,
    devices: Sequence[Device],
    times: int = 16,
    dtype: Any = "float32",
    others: Others = lambda x: (),
) -> float:
    """Seconds of one operation of a chain, run by every device on its own array; what a call takes is no part of it."""
    clock, cores = clock_of(devices)

    def chain(x: jax.Array, count: jax.Array) -> jax.Array:
        weights = others(x)
        return lax.fori_loop(0, count, lambda _, y: operation(y, *weights).astype(y.dtype), x)

    short, long = _timed(chain, shape, mesh, devices, dtype, clock, (times, LONGER * times))
    if long <= short:  # noise hides the difference
        return long / cores / (LONGER * times)
    return (long - short) / cores / ((LONGER - 1) * times)


def apart_seconds(operation: Operation, shape: tuple[int, ...], mesh: Mesh, devices: Sequence[Device]) -> float:
    """Least seconds of one operation of a chain, run by every device on one after another of its own arrays.

    So it is run in a program, where other arrays have been used since and caches do not hold this one. It is timed by
    the wall clock, and by the least of the runs, as other programs can only add to it.
    """

    def chain(arrays: jax.Array, count: jax.Array) -> jax.Array:
        def replaced(i: jax.Array, arrays: jax.Array) -> jax.Array:
            x = lax.dynamic_index_in_dim(arrays, i, keepdims=False)
            return lax.dynamic_update_index_in_dim(arrays, operation(x), i, 0)

        return lax.fori_loop(0, count, replaced, arrays)

    count = _arrays(math.prod(shape))
    return _timed(chain, (count, *shape), mesh, devices, "float32", time.perf_counter, (count,))[0] / count


def between_products_seconds(
    operation: Operation,
    n: int,
    mesh: Mesh,
    devices: Sequence[Device],
    before: Callable[[jax.Array], jax.Array] = lambda matrix: matrix,
) -> float:
    """Median seconds of a product and one operation on n numbers after it, of a chain as that of `apart_seconds`.

    Collectives are measured so. Devices that share cores have work when the first of them comes to a collective, and
    threads that waited for it have to be woken: among 8 devices on 2 cores, gathering 16 KiB takes 0.09 ms by itself
    and 0.24 ms between products (`python -m benchmarks.between_products`). What comes `before` takes the matrix that is
    multiplied, and its time is added.
    """

    def chain(arrays: jax.Array, count: jax.Array) -> jax.Array:
        def replaced(i: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            arrays, matrix = carried
            product = multiplied(before(matrix))
            x = lax.dynamic_index_in_dim(arrays, i, keepdims=False).at[0].add(product[0, 0] * TINY)
            arrays = lax.dynamic_update_index_in_dim(arrays, operation(x), i, 0)
            return arrays, product + arrays[i, 0] * TINY

        matrix = jnp.full((WORK, WORK), arrays[0, 0])
        return lax.fori_loop(0, count, replaced, (arrays, matrix))[0]

    count = _arrays(n)
    clock = time.perf_counter
    return _timed(chain, (count, n), mesh, devices, "float32", clock, (count,), TYPICAL, statistics.median)[0] / count


def multiplied(matrix: jax.Array) -> jax.Array:
    """The product that stands between collectives."""
    return jnp.tanh(matrix @ matrix)


def _arrays(elements: int) -> int:
    """The number of arrays of so many float32 numbers that a chain goes through."""
    return min(ARRAYS, max(FEWEST_ARRAYS, HELD_NBYTES // (4 * elements)))


def _timed(
    chain: Callable[[jax.Array, jax.Array], jax.Array],
    shape: tuple[int, ...],
    mesh: Mesh,
    devices: Sequence[Device],
    dtype: Any,
    clock: Callable[[], float],
    counts: Sequence[int],
    runs: int = REPEATS,
    of: Callable[[Sequence[float]], float] = min,
) -> list[float]:
    """Seconds by the clock of a chain of each number of operations, which every device runs on its own array: the least
    or another of so many runs, or of fewer long ones.

    The number is an argument, so that one program is compiled for all.
    """
    if mesh.axes:
        real, spec = device_mesh(mesh, devices), PartitionSpec(mesh.axes)
        chain = jax.shard_map(chain, mesh=real, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
        shape, placed = (shape[0] * mesh.size, *shape[1:]), NamedSharding(real, spec)
        everywhere: Any = NamedSharding(real, PartitionSpec())
    else:
        placed = everywhere = devices[0]
    x = jax.device_put(jnp.full(shape, 0.5, dtype), placed)
    run = jax.jit(chain, donate_argnums=0)
    times: list[float] = []
    for number in counts:
        count = jax.device_put(np.int32(number), everywhere)
        x = run(x, count).block_until_ready()
        spent: list[float] = []
        while len(spent) < (runs if max(spent, default=0.0) < LONG_SECONDS else FEWER):
            start = clock()
            x = run(x, count).block_until_ready()
            spent.append(clock() - start)
        times.append(of(spent))
    return times


def clock_of(devices: Sequence[Device]) -> tuple[Callable[[], float], int]:
    """The clock to time by, and the number to divide its seconds by.

    Virtual CPU devices are kept busy by this process's threads, so the processor time that these take, over the cores,
    is what a step takes where nothing else runs, and other programs do not spoil it.
    """
    if devices[0].platform != "cpu" or len(devices) == 1:
        return time.perf_counter, 1
    return time.process_time, min(os.cpu_count() or 1, len(devices))
