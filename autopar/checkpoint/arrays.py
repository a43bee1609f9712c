"""The arrays of a checkpoint on disk, by Orbax: each process writes and reads the shards of its own devices.

Orbax takes arrays of which every process has a part. A pipeline's arrays are on the devices of some processes alone, so
leaves are handed over as `Shards`: what a process has of an array, which may be nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from autopar import jax_compat
from autopar.checkpoint.manifest import CheckpointError
from autopar.distributed import Memory, Processes, nowhere
from autopar.errors import ArgumentError, explain

SECONDS = 1200
"""Seconds that a process waits for the others to write."""


def orbax() -> Any:
    """The library. Raises CheckpointError without it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        rule = "checkpoints are written by Orbax, which is not installed"
        raise CheckpointError(explain("autopar.Checkpoints", rule, "", "pip install 'autopar[checkpoint]'")) from error
    return orbax.checkpoint


@dataclass(frozen=True, slots=True)
class _Absent:
    """A shard of this type that another process writes."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class _Shard:
    index: Any
    replica_id: int
    contents: Any
    device: Any = None
    """Where the contents lay that are a copy in the host's memory now."""

    @functools.cached_property
    def data(self) -> Any:
        """The contents as a JAX array, made when it is first asked for: that takes as long as half the copy."""
        return self.contents if self.device is None else jax.device_put(self.contents, self.device)


class Shards:
    """The shards that this process writes of an array, with the attributes that Orbax reads of one.

    On CPUs, where Orbax would read them in place, they are copies: the next step may reuse the array's own buffers.
    """

    def __init__(self, array: jax.Array, memory: Memory) -> None:
        self.shape, self.dtype, self.ndim, self.sharding = array.shape, array.dtype, array.ndim, array.sharding
        self.itemsize, self.size, self.nbytes = array.dtype.itemsize, array.size, array.nbytes
        self.is_copied = all(device.platform == "cpu" for device in array.sharding.device_set)
        shards = [
            _Shard(shard.index, shard.replica_id, _copied(shard.data, memory), shard.device)
            if self.is_copied
            else _Shard(shard.index, shard.replica_id, shard.data)
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
        absent = _Absent(array.sharding.shard_shape(array.shape), array.dtype)
        self.addressable_shards = shards or [_Shard((), -1, absent)]


def _copied(data: jax.Array, memory: Memory) -> np.ndarray:
    """The contents of an array of a single CPU device in memory of their own.

    New buffers for what is donated take far longer to make than a copy in memory that is used again.
    """
    contents = np.asarray(data)
    copy = memory.take(contents.nbytes).view(contents.dtype).reshape(contents.shape)
    np.copyto(copy, contents)
    return copy


@dataclass(frozen=True, slots=True)
class Arrays:
    """Orbax's part of a program's checkpoints: `checkpointer` saves in the background, `handler` restores."""

    checkpointer: Any
    handler: Any

    @classmethod
    def of(cls, processes: Processes | None) -> Arrays:
        """Orbax set up for these processes. Raises CheckpointError where it is not installed."""
        ocp = orbax()
        kinds = ocp.type_handlers
        arrays = kinds.ArrayHandler(use_replica_parallel=False, enable_write_sharding_file=False)
        registry = kinds.create_type_handler_registry(
            (Shards, arrays), (jax.Array, arrays), (np.ndarray, kinds.NumpyHandler())
        )
        # Compressing takes as long as all else does, beside the steps, and floats hardly shrink.
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
        ranks = set(processes.ranks) if processes else {0}
        checkpointer = ocp.AsyncCheckpointer(
            handler,
            timeout_secs=SECONDS,
            # Named processes wait for each other in the coordination service; all of them would run a collective.
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=ranks),
        )
        return cls(checkpointer, handler)

    def save(self, folder: Path, state: Any) -> None:
        """Begins to write a pytree of the results of `written`; its arrays have been read when this returns."""
        if jax.tree.leaves(state):  # Orbax refuses to write nothing
            self.checkpointer.save(folder, args=orbax().args.PyTreeSave(state), force=True)

    def restore(self, folder: Path, like: Any) -> Any:
        """The pytree of arrays in a folder, each in the sharding of the corresponding leaf of `like`."""
        from etils import epath  # Orbax's own paths

        ocp = orbax()
        leaves, tree = jax.tree.flatten(like)
        targets = [_target(leaf) for leaf in leaves]
        read = [0 not in shape and bool(sharding.addressable_devices) for shape, _, sharding in targets]
        args = [
            ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype)
            if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            else ocp.RestoreArgs(restore_type=np.ndarray)
            for leaf, (shape, dtype, sharding) in zip(leaves, targets, strict=True)
        ]
        items = [leaf if is_read else ocp.PLACEHOLDER for leaf, is_read in zip(args, read, strict=True)]
        request = ocp.args.PyTreeRestore(
            item=jax.tree.unflatten(tree, items), restore_args=jax.tree.unflatten(tree, args)
        )
        is_empty = all(0 in shape for shape, _, _ in targets)  # and there is nothing to read
        restored = leaves if is_empty else tree.flatten_up_to(self.handler.restore(epath.Path(folder), args=request))
        arrays = [
            _restored(array, leaf) if is_read else _empty(leaf, *target)
            for array, leaf, target, is_read in zip(restored, leaves, targets, read, strict=True)
        ]
        return jax.tree.unflatten(tree, arrays)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, or an array of them."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_leaf(path: str, leaf: Any) -> None:
    """Raises ArgumentError unless the leaf at this path is an array of numbers, a number or a key, and not deleted."""
    kind = f"a {type(leaf).__name__}"
    if jax_compat.is_traced(leaf):
        rule, remedy = (
            "it is a traced value, which has no contents yet",
            "save outside of jit, grad and other transformations",
        )
        raise ArgumentError(explain(f"save(state{path})", rule, "", remedy))
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        rule, remedy = "it was deleted, or donated to a step", "save the state that the step returned"
        raise ArgumentError(explain(f"save(state{path})", rule, "", remedy))
    if isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "__array__"):
        dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        is_number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
        if is_key(leaf) or (is_number and _is_stored(dtype)):
            return
        kind += f" of dtype {dtype}"
        if is_number:
            rule = f"it is {kind}, which Orbax's files do not know"
            raise ArgumentError(explain(f"save(state{path})", rule, "", "save it as another dtype"))
    rule = f"it is {kind}, and a state is of arrays of numbers, numbers, keys and None"
    remedy = "leave it out of the state; plain data can be passed as position="
    raise ArgumentError(explain(f"save(state{path})", rule, "", remedy))


def check_paths(paths: Sequence[Any]) -> None:
    """Raises ArgumentError if two leaves have paths that Orbax would write in one place: it joins keys with dots."""
    written = dict[str, str]()
    for path in paths:
        name, mine = jax.tree_util.keystr(path, simple=True, separator="."), jax.tree_util.keystr(path)
        if (other := written.setdefault(name, mine)) != mine:
            rule = f"Orbax writes both as {name!r}"
            raise ArgumentError(explain(f"save(state{other}) and save(state{mine})", rule, "", "give one another key"))


def _is_stored(dtype: Any) -> bool:
    """Whether Orbax stores this dtype; it does not if the byte order is not the machine's."""
    import tensorstore  # Orbax's own files

    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        return False
    return dtype.isnative


def words(leaf: Any) -> Any:
    """A leaf as plain numbers: keys as the words that they consist of."""
    if not is_key(leaf):
        return leaf
    if leaf.is_fully_addressable or leaf.addressable_shards:
        return jax.random.key_data(leaf)
    struct = _type_of_words(leaf)
    return nowhere(struct.shape, struct.dtype, leaf.sharding)


def _type_of_words(leaf: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def written(leaf: Any, is_global: bool, memory: Memory) -> Shards | np.ndarray | None:
    """A leaf as it is given to Orbax: on CPUs as a copy in this memory, as plain numbers, and never empty."""
    if np.size(leaf) == 0:
        return None
    return Shards(words(leaf), memory) if is_global else np.array(words(leaf))


def _target(leaf: Any) -> tuple[tuple[int, ...], Any, Sharding]:
    """The shape, dtype and sharding of a leaf's words."""
    struct = _type_of_words(leaf) if is_key(leaf) else leaf
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return np.shape(struct), np.asarray(struct).dtype if np.isscalar(struct) else struct.dtype, sharding


def _restored(array: Any, leaf: Any) -> Any:
    """An array as the kind of its leaf: a JAX or NumPy array or scalar, keys or a number."""
    if is_key(leaf):
        return jax.random.wrap_key_data(array, impl=jax_compat.key_implementation(leaf.dtype))
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(array.item())
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(array) if isinstance(leaf, np.ndarray) else np.asarray(array)[()]
    return jax_compat.with_weakness(array, bool(getattr(leaf, "weak_type", False)))


def _empty(leaf: Any, shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Any:
    """An array without elements, or one of which this process has none."""
    if isinstance(leaf, np.ndarray):
        return np.zeros(shape, dtype)
    if not sharding.addressable_devices:
        return nowhere(leaf.shape, leaf.dtype, sharding)
    zeros = [
        jax.device_put(jnp.zeros(sharding.shard_shape(leaf.shape), leaf.dtype), device)
        for device in sharding.addressable_devices_indices_map(leaf.shape)
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, zeros)
