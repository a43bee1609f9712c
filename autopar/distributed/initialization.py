"""State made where it will be read: on each set of devices by a program that makes only its own arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from autopar import jax_compat
from autopar.distributed.pieces import check_here, nowhere, placed
from autopar.jax_compat import Device


def made(init_fn: Callable[..., Any], args: tuple[Any, ...], shardings: Sequence[Sharding]) -> Any:
    """The pytree `init_fn(*args)` with its leaves in these shardings.

    Leaves on the same devices are made by one program on these; of several processes, by those that have any of the
    devices. Raises DeviceError on devices that are only described.
    """
    struct = jax.eval_shape(init_fn, *args)
    types, tree = jax.tree.flatten(struct)
    groups: dict[tuple[Device, ...], list[int]] = {}
    for index, sharding in enumerate(shardings):
        groups.setdefault(_devices(sharding), []).append(index)
    leaves: list[Any] = [None] * len(types)
    with jax_compat.no_mesh():
        for devices, indices in groups.items():
            targets = tuple(shardings[i] for i in indices)
            check_here(targets[0])
            if targets[0].addressable_devices:
                arrays = _program(init_fn, indices, targets)(*_everywhere(args, devices))
            else:
                arrays = [nowhere(types[i].shape, types[i].dtype, shardings[i]) for i in indices]
            for index, array in zip(indices, arrays, strict=True):
                leaves[index] = array
    return jax.tree.unflatten(tree, leaves)


def _program(init_fn: Callable[..., Any], indices: Sequence[int], shardings: tuple[Sharding, ...]) -> Any:
    """The function that makes only these leaves."""

    def leaves(*args: Any) -> tuple[Any, ...]:
        made = jax.tree.leaves(init_fn(*args))
        return tuple(made[i] for i in indices)

    return jax.jit(leaves, out_shardings=shardings)


def _everywhere(args: tuple[Any, ...], devices: tuple[Device, ...]) -> tuple[Any, ...]:
    """The arguments with their arrays replicated on all of the devices."""
    mesh = Mesh(np.asarray(devices, dtype=object), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: placed(leaf, sharding), args)


def _devices(sharding: Sharding) -> tuple[Device, ...]:
    """The devices of a sharding in its own order; programs on another order are different programs."""
    if isinstance(sharding, NamedSharding):
        grid: Any = sharding.mesh.devices
        return tuple(grid.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))
