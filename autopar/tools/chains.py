"""Seconds of one operation, measured as a chain of it that every device runs at once on its own array."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar.jax_compat import Device
from autopar.lowering import device_mesh
from passes.cluster import Mesh

REPEATS, FEWER = 5, 3
"""Runs of a chain, of which the fastest counts, as disturbances can only lengthen it; fewer of a long one."""

ROUNDS, ROUND_SECONDS = 5, 0.02
"""Rounds over all chains of collectives, and seconds that one is run for in each, once at least. How threads meet stays
one way for a tenth of a second or more, then is another: 15 runs on end of sums of 4 KiB have medians of 0.3 to 1.3 ms,
whether among 2, 4 or 8 of 8 devices on 2 cores, and three chains in one second are within a third of each other. So
each is come back to, and what they differ by is not when they ran."""

LONG_SECONDS = 0.1
"""A run so long is many times the slice of an operating system's scheduler: runs of one chain were within 10 % of each
other, those of shorter ones within 30 % (8 devices on 2 cores beside other programs)."""

LONGER = 3
"""The factor by which a second chain is longer; the difference of both is the time of the operations, as a call by
itself takes as long as many small ones.
"""

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
"""A function from an array, and others that stay the same, to an array of the first one's shape and dtype."""

Others = Callable[[jax.Array], tuple[jax.Array, ...]]
"""A function that makes the other arrays of an operation from the first one: as constants, a compiler would rearrange
them.
"""


def seconds(
    operation: Operation,
    shape: tuple[int, ...],
    mesh: Mesh,
    devices: Sequence[Device],
    times: int = 16,
    dtype: Any = "float32",
    others: Others = lambda x: (),
) -> float:
    """Seconds of one operation of a chain, run by every device on its own array, without the time of a call."""
    clock, cores = clock_of(devices)

    def chain(x: jax.Array, count: jax.Array) -> jax.Array:
        weights = others(x)
        return lax.fori_loop(0, count, lambda _, y: operation(y, *weights).astype(y.dtype), x)

    short, long = _fastest(chain, shape, mesh, devices, dtype, clock, (times, LONGER * times))
    if long <= short:  # noise hides the difference
        return long / cores / (LONGER * times)
    return (long - short) / cores / ((LONGER - 1) * times)


def apart_seconds(operation: Operation, shape: tuple[int, ...], mesh: Mesh, devices: Sequence[Device]) -> float:
    """The least seconds of one operation of a chain, run by every device on one of its own arrays after another.

    It then runs as in a program, where other arrays have been used since and caches do not have this one. It is timed
    by the wall clock, and the fastest run counts, as other programs can only add to it.
    """

    def chain(arrays: jax.Array, count: jax.Array) -> jax.Array:
        def replaced(i: jax.Array, arrays: jax.Array) -> jax.Array:
            x = lax.dynamic_index_in_dim(arrays, i, keepdims=False)
            return lax.dynamic_update_index_in_dim(arrays, operation(x), i, 0)

        return lax.fori_loop(0, count, replaced, arrays)

    count = _arrays(math.prod(shape))
    return _fastest(chain, (count, *shape), mesh, devices, "float32", time.perf_counter, (count,))[0] / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A program of `count` operations, one after another on every device, and the seconds that each run took of one."""

    run: Callable[[jax.Array, jax.Array], jax.Array]
    filled: Callable[[], jax.Array]
    everywhere: Any
    count: int = 1
    spent: list[float] = field(default_factory=list[float])

    @staticmethod
    def of(
        chain: Callable[[jax.Array, jax.Array], jax.Array],
        shape: tuple[int, ...],
        mesh: Mesh,
        devices: Sequence[Device],
        dtype: Any = "float32",
        count: int = 1,
    ) -> Chain:
        """The program that every device runs on its own array of this shape; it is compiled once it is run."""
        if mesh.axes:
            real, spec = device_mesh(mesh, devices), PartitionSpec(mesh.axes)
            chain = jax.shard_map(chain, mesh=real, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
            shape, placed = (shape[0] * mesh.size, *shape[1:]), NamedSharding(real, spec)
            everywhere: Any = NamedSharding(real, PartitionSpec())
        else:
            placed = everywhere = SingleDeviceSharding(devices[0])
        run = jax.jit(chain, donate_argnums=0)
        return Chain(run=run, filled=_filled(shape, dtype, placed), everywhere=everywhere, count=count)

    def timed(self, number: int, clock: Callable[[], float], is_done: Callable[[list[float]], bool]) -> list[float]:
        """Seconds of one operation in each of several runs, until it `is_done`; a run before them is not timed."""
        x, count = self.filled(), jax.device_put(np.int32(number), self.everywhere)
        x = self.run(x, count).block_until_ready()
        spent: list[float] = []
        while not is_done(spent):
            start = clock()
            x = self.run(x, count).block_until_ready()
            spent.append(clock() - start)
        return spent

    def go_on(self) -> None:
        """Runs it for one round, by the wall clock."""
        spent = self.timed(self.count, time.perf_counter, lambda spent: sum(spent) >= ROUND_SECONDS)
        self.spent.extend(each / self.count for each in spent)

    @property
    def seconds(self) -> float:
        """Mean seconds of one operation in the middle half of the runs.

        A program's collectives meet in all ways in turn, so it sees their mean; what else disturbs a run can only
        lengthen it.
        """
        quarter = len(self.spent) // 4
        return statistics.fmean(sorted(self.spent)[quarter : len(self.spent) - quarter])


@lru_cache
def _filled(shape: tuple[int, ...], dtype: Any, placed: Sharding) -> Callable[[], jax.Array]:
    """A function that makes the array of a chain where it is to lie, compiled once for all chains."""
    return jax.jit(lambda: jnp.full(shape, 0.5, dtype), out_shardings=placed)


def between_products(
    operation: Operation,
    n: int,
    mesh: Mesh,
    devices: Sequence[Device],
    before: Callable[[jax.Array], jax.Array] = lambda matrix: matrix,
) -> Chain:
    """The chain of a product and one operation on n numbers after it, on one array after another as `apart_seconds`.

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
    return Chain.of(chain, (count, n), mesh, devices, count=count)


def multiplied(matrix: jax.Array) -> jax.Array:
    """The product that stands between collectives."""
    return jnp.tanh(matrix @ matrix)


def _arrays(elements: int) -> int:
    """The number of arrays of that many float32 numbers that a chain goes through."""
    return min(ARRAYS, max(FEWEST_ARRAYS, HELD_NBYTES // (4 * elements)))


def _fastest(
    chain: Callable[[jax.Array, jax.Array], jax.Array],
    shape: tuple[int, ...],
    mesh: Mesh,
    devices: Sequence[Device],
    dtype: Any,
    clock: Callable[[], float],
    counts: Sequence[int],
) -> list[float]:
    """Least seconds by the clock of a chain of each number of operations, which every device runs on its own array.

    The number is an argument, so that one program is compiled for all.
    """
    program = Chain.of(chain, shape, mesh, devices, dtype)

    def is_done(spent: list[float]) -> bool:
        return len(spent) >= (REPEATS if max(spent, default=0.0) < LONG_SECONDS else FEWER)

    return [min(program.timed(number, clock, is_done)) for number in counts]


def clock_of(devices: Sequence[Device]) -> tuple[Callable[[], float], int]:
    """(clock to time by, number to divide its seconds by).

    Virtual CPU devices run on this process's threads, so the processor time of these, divided by the cores, is what a
    step takes where nothing else runs, and other programs do not disturb it.
    """
    if devices[0].platform != "cpu" or len(devices) == 1:
        return time.perf_counter, 1
    return time.process_time, min(os.cpu_count() or 1, len(devices))
