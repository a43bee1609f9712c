"""Global arrays made of what one process has of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from autopar import jax_compat
from autopar.errors import not_here


def placed(leaf: Any, sharding: Sharding) -> jax.Array:
    """The array that this process has whole, in a sharding that may have devices of others.

    Raises DeviceError on devices that are only described.
    """
    check_here(sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if not sharding.addressable_devices:
        struct = jax.eval_shape(lambda array: array, leaf)
        return nowhere(struct.shape, struct.dtype, sharding)
    array = leaf if hasattr(leaf, "shape") else jnp.asarray(leaf)
    indices = sharding.addressable_devices_indices_map(array.shape)
    pieces = [jax.device_put(_cut(array, index), device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


def check_here(sharding: Sharding) -> None:
    """Raises DeviceError for devices that are only described: JAX may end the process that uses them."""
    device = next(iter(sharding.device_set))
    if jax_compat.is_described(device):
        raise not_here(device)


def nowhere(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    """An array of which this process has no part."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def _cut(array: Any, index: Any) -> Any:
    full = all(part.indices(size)[:2] == (0, size) for part, size in zip(index, array.shape, strict=True))
    return array if full else array[index]
