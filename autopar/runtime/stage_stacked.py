"""Arrays over all stages of a pipeline: the caller's whole arrays, whose pieces are on the stages one after the other.

The mesh of such an array has the stages as its first axis, which cuts dimension 0. Where the stages' meshes are alike,
the array is made of the very buffers that the stages have.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice, pairwise
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar import jax_compat
from autopar.plan import axes_of
from autopar.runtime.arrivals import Arrivals
from autopar.runtime.program import Donation
from passes.plan import STAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The number of equal pieces along dimension 0 in which each of the caller's flat inputs and outputs enters and
    leaves.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def structs(self, structs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """The types of the program's inputs, from those of the caller's."""
        return [piece for struct, n in zip(structs, self.inputs, strict=True) for piece in [_struct(struct, n)] * n]

    def donation(self, of: Donation) -> Donation:
        """The donation of the caller's inputs, from that of the program's."""
        ends = list(accumulate(self.inputs, initial=0))
        spans = [range(first, last) for first, last in pairwise(ends)]
        gone = set(of.positions)
        return Donation(
            positions=tuple(i for i, span in enumerate(spans) if not gone.isdisjoint(span)),
            names=tuple(
                of.names[span[0]] if len(span) == 1 else of.names[span[0]].rpartition("[")[0] for span in spans
            ),
        )


def placements(
    pieces: Pieces, shardings: Sequence[Sharding]
) -> tuple[list[Sharding], dict[Sharding, tuple[Sharding, ...]]]:
    """The sharding of each of the caller's flat inputs, from those of the program's, and the chunks of joined ones.

    Where no array over stages can be made of an input's pieces, it is the sharding of the first.
    """
    whole: list[Sharding] = []
    origins: dict[Sharding, tuple[Sharding, ...]] = {}
    given = iter(shardings)
    for count in pieces.inputs:
        parts = tuple(islice(given, count))
        target = _target(parts) if count > 1 else None
        whole.append(target.whole if target else parts[0])
        if target:
            origins[target.whole] = target.chunks
    return whole, origins


def _struct(struct: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    if count == 1:
        return struct
    rows, *inner_shape = struct.shape
    return jax.ShapeDtypeStruct((rows // count, *inner_shape), struct.dtype, weak_type=struct.weak_type)


@dataclass(slots=True)
class StageStacked:
    """A pipeline whose inputs and outputs are in pieces, called on whole arrays, which are copied only if they must be.

    An output is one array over all stages that have pieces of it, cut along dimension 0. As an input of the next step
    it is taken apart in place. `donation` is of the caller's arrays. `origins` are the placements of the pieces of such
    arrays; `fresh` has, by `id`, the pieces of arrays that share their buffers, as long as these live.
    """

    pipeline: Callable[[list[Any]], Sequence[Any]]
    pieces: Pieces
    out_tree: jax_compat.PyTreeDef
    donation: Donation = field(default_factory=Donation)
    origins: dict[Sharding, tuple[Sharding, ...]] = field(default_factory=dict)
    targets: dict[tuple[Sharding, ...], _Target | None] = field(default_factory=dict)
    fresh: dict[int, tuple[weakref.ref[Any], list[jax.Array]]] = field(default_factory=dict)
    arrivals: Arrivals | None = None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        with jax_compat.no_mesh() if jax_compat.has_ambient_mesh() else nullcontext():
            self.donation.check_there(leaves)
            self.donation.check(leaves)
            given = [
                piece for leaf, n in zip(leaves, self.pieces.inputs, strict=True) for piece in self._apart(leaf, n)
            ]
            results = iter(self.pipeline(given))
            self.donation.delete(leaves)
            joined = [self._join(list(islice(results, n))) for n in self.pieces.outputs]
        return jax.tree.unflatten(self.out_tree, joined)

    def _apart(self, leaf: Any, count: int) -> list[Any]:
        if count == 1:
            return [leaf]
        joined_array, pieces = self.fresh.get(id(leaf), (None, []))
        if joined_array is not None and joined_array() is leaf:
            return pieces
        rows = leaf.shape[0] // count
        origins = self.origins.get(leaf.sharding) if isinstance(leaf, jax.Array) else None
        if origins is None:
            return [leaf[i * rows : (i + 1) * rows] for i in range(count)]
        shape = (leaf.shape[0] // len(origins), *leaf.shape[1:])
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        chunks = [
            jax.make_array_from_single_device_arrays(
                shape, sharding, [shards[d] for d in sharding.addressable_devices], dtype=leaf.dtype
            )
            for sharding in origins
        ]
        return [piece for chunk in chunks for piece in _split(chunk, count // len(chunks))]

    def _join(self, pieces: list[jax.Array]) -> jax.Array:
        if len(pieces) == 1:
            return pieces[0]
        shardings = tuple(piece.sharding for piece in pieces)
        if shardings not in self.targets:
            target = self.targets[shardings] = _target(shardings)
            if target:
                self.origins[target.whole] = target.chunks
        target = self.targets[shardings]
        if target is None:
            return jnp.concatenate([self._moved(piece, shardings[0]) for piece in pieces])
        shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        if shardings == target.chunks:
            joined = _over_stages(shape, target.whole, pieces)
            key, forget = id(joined), self.fresh.pop
            self.fresh[key] = weakref.ref(joined, lambda _: forget(key, None)), pieces
            return joined
        several, size = iter(pieces), len(pieces) // len(target.chunks)
        chunks = [self._moved(_concatenated(list(islice(several, size))), sharding) for sharding in target.chunks]
        return _over_stages(shape, target.whole, chunks)

    def _moved(self, array: jax.Array, sharding: Sharding) -> jax.Array:
        return self.arrivals.transferred(array, sharding) if self.arrivals else jax.device_put(array, sharding)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The sharding of a joined array, and those of its chunks, of one or more pieces each."""

    whole: NamedSharding
    chunks: tuple[Sharding, ...]


def _target(pieces: tuple[Sharding, ...]) -> _Target | None:
    """The sharding of an array over the stages that hold its pieces; None if there is none."""
    runs = [list(run) for _, run in groupby(pieces, key=_ids)]
    places = [_ids(run[0]) for run in runs]
    if len({device for ids in places for device in ids}) < sum(map(len, places)):
        return None  # pieces of one stage that do not follow each other
    stages = [run[0] for run in runs]
    if len({len(run) for run in runs}) == 1 and (chunks := _alike(stages)):
        return _Target(whole=_joined(chunks), chunks=tuple(chunks))
    # Stages of other sizes, or whose pieces are cut in other ways: every piece lies whole on a device of its stage.
    if any(len(run) > len(ids) for run, ids in zip(runs, places, strict=True)):
        return None
    devices = [device for run in runs for device in sorted(run[0].device_set, key=lambda d: d.id)[: len(run)]]
    chunks = [SingleDeviceSharding(device) for device in devices]
    return _Target(whole=_joined(chunks), chunks=tuple(chunks))


def _joined(chunks: Sequence[Sharding]) -> NamedSharding:
    """The sharding of consecutive chunks whose shardings differ only in their devices."""
    first = chunks[0]
    if not isinstance(first, NamedSharding):
        devices = [next(iter(chunk.device_set)) for chunk in chunks]
        return NamedSharding(_mesh(np.asarray(devices, dtype=object), ()), PartitionSpec(STAGE))
    grid = np.stack([np.asarray(cast("NamedSharding", chunk).mesh.devices) for chunk in chunks])
    along, *other_axes = first.spec or (None,)
    return NamedSharding(_mesh(grid, first.mesh.axis_names), PartitionSpec((STAGE, *axes_of(along)), *other_axes))


def _alike(stages: Sequence[Sharding]) -> Sequence[Sharding]:
    """The first stage's placement on each stage's mesh; empty if their meshes differ in more than the devices."""
    if all(isinstance(sharding, SingleDeviceSharding) for sharding in stages):
        return stages
    named = [sharding for sharding in stages if isinstance(sharding, NamedSharding)]
    kinds = {tuple(sharding.mesh.shape.items()) for sharding in named}
    if len(named) < len(stages) or len(kinds) > 1:
        return []
    return [NamedSharding(cast("Mesh", sharding.mesh), named[0].spec) for sharding in named]


def _mesh(grid: Any, names: tuple[str, ...]) -> Mesh:
    """A mesh whose first axis is the stages."""
    return Mesh(grid, (STAGE, *names), axis_types=(AxisType.Auto,) * (1 + len(names)))


def _ids(sharding: Sharding) -> tuple[int, ...]:
    return tuple(sorted(device.id for device in sharding.device_set))


def _over_stages(shape: tuple[int, ...], sharding: Sharding, chunks: Sequence[jax.Array]) -> jax.Array:
    shards = [shard.data for chunk in chunks for shard in chunk.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=chunks[0].dtype)


def _concatenated(pieces: list[jax.Array]) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _split(chunk: jax.Array, count: int) -> list[jax.Array]:
    return [chunk] if count == 1 else jnp.split(chunk, count)
