"""Arrays between any devices of all processes, in any sharding to any other, in turn: a script for `launch`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar.distributed import among, placed
from autopar.runtime import cross_process
from autopar.runtime.cross_process import takes_part, transport_of
from autopar.runtime.transfer import arrived, compile_transfer
from autopar.runtime.transfer_plan import plan_transfer

SHAPES = ((8, 4), (4, 8, 3), (16,), (), (0, 4))
DTYPES = ("float32", "bfloat16", "bool", "int8", "complex64")


def sharding(shape: tuple[int, ...], draw: np.random.Generator) -> Sharding:
    devices = draw.permutation(np.asarray(jax.devices(), dtype=object))
    size = int(draw.choice([n for n in (1, 2, 4) if n <= len(devices)]))
    if size == 1:
        return SingleDeviceSharding(devices[0])
    grid = (2, size // 2) if draw.random() < 0.5 else (size, 1)
    mesh = Mesh(devices[:size].reshape(grid), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    axes: list[Any] = list(draw.permutation(["x", "y"]))
    # Of arrays without elements `jax.device_put` itself makes wrong shards where devices come in another order.
    dims = [
        axes.pop() if axes and length % 4 == 0 and draw.random() < 0.7 and 0 not in shape else None for length in shape
    ]
    return NamedSharding(mesh, PartitionSpec(*dims))


def values(shape: tuple[int, ...], dtype: str, draw: np.random.Generator) -> jax.Array:
    if dtype == "key":
        return jax.random.split(jax.random.key(7), shape) if shape else jax.random.key(7)
    return jnp.asarray(draw.integers(0, 99, shape), dtype)


def plain(array: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array)


def main(count: int, seed: int) -> None:
    draw, processes = np.random.default_rng(seed), among(jax.devices())
    assert processes is not None
    cross_process.LARGE_NBYTES = 64  # so that some go over either kind of connection
    for number in range(count):
        shape, dtype = SHAPES[draw.integers(len(SHAPES))], str(draw.choice([*DTYPES, "key"]))
        source, target, keeps = sharding(shape, draw), sharding(shape, draw), bool(draw.random() < 0.5)
        whole = values(shape, dtype, draw)
        wanted = plain(whole)
        plan = plan_transfer(shape, whole.dtype, source, target)
        if not takes_part(source, target, processes):
            continue
        array = placed(whole, source)
        moved = arrived(compile_transfer(plan, transport_of(plan, processes), keeps=keeps).run(array))
        if keeps and plan.kind != "alias" and array.addressable_shards:
            array.delete()
        assert (moved.shape, moved.dtype, moved.sharding) == (shape, whole.dtype, target), number
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(plain(shard.data), wanted[shard.index], f"{number}: {plan.format()}")
    print("moved", count)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
