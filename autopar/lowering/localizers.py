"""Primitives on local pieces whose parameters name shapes or positions, or whose results depend on where a piece is.

Each function takes a cut node and this device's pieces of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.lax import GatherScatterMode

from autopar import jax_compat
from autopar.errors import UnsupportedError, explain
from autopar.lowering.localize import Arrays, Cut, localizes, offset, piece_index, rebind
from passes.errors import InternalError
from passes.ir import CALLBACKS

USERS_OWN = "users_own_shard_map"
"""The scope of collectives in users' own shard_maps, which are not the plan's."""


@localizes(*CALLBACKS)
def _(cut: Cut, operands: Arrays) -> Arrays:
    """The first device calls; the others add nothing to what comes of it."""
    if not cut.mesh.axes:
        return rebind(cut, operands)

    def idle(*_: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(t.shape, t.dtype) for t in cut.results]

    is_first = piece_index(cut.mesh.axes, cut.mesh, cut.coordinate) == 0
    return lax.cond(is_first, lambda *arguments: list(_called(cut, arguments)), idle, *operands)


def _called(cut: Cut, operands: Arrays) -> Arrays:
    """The results of a callback; JAX keeps order on several devices for `io_callback` alone."""
    if cut.node.primitive == "io_callback" or not jax_compat.is_ordered(cut.params):
        return rebind(cut, operands)

    def report(*arguments: Any) -> tuple[()]:
        cut.equation.primitive.impl(*arguments, **cut.params)
        return ()

    io_callback(report, (), *operands, ordered=True)
    return ()


@localizes("shard_map")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """Its body is one device's program, and this is one device: the axes have the names that it knows."""
    with jax.named_scope(USERS_OWN):
        return jax_compat.call_local(cut.params, operands)


@localizes("slice")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """A dimension that is cut is one that the slice keeps whole, or takes one element of, which one device has."""
    (source,), params, dims = operands, cut.params, cut.placement.operands[0].dims
    starts, limits, is_mine = list(params["start_indices"]), list(params["limit_indices"]), []
    for d, (axes, extent) in enumerate(zip(dims, source.shape, strict=True)):
        if not axes:
            continue
        if cut.results[0].shape[d] == cut.operands[0].shape[d]:
            limits[d] = extent
            continue
        piece, starts[d] = divmod(starts[d], extent)
        limits[d] = starts[d] + 1
        is_mine.append(piece_index(axes, cut.mesh, cut.coordinate) == piece)
    strides = params["strides"]
    if strides is not None:  # a stride past the one element of a piece would leave it
        strides = tuple(1 if axes else stride for axes, stride in zip(dims, strides, strict=True))
    (result,) = rebind(cut, operands, start_indices=tuple(starts), limit_indices=tuple(limits), strides=strides)
    if not is_mine:
        return (result,)
    return (jnp.where(jnp.stack(is_mine).all(), result, jnp.zeros_like(result)),)


@localizes("iota")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """The positions count in integers first: a sum of rounded floats is not the rounded sum."""
    shape, dimension, dtype = cut.local_shape(), cut.params["dimension"], jnp.dtype(cut.params["dtype"])
    counter = dtype if jnp.issubdtype(dtype, np.integer) else np.dtype(np.int32)
    begin = offset(cut, cut.placement.results[0].dims[dimension], shape[dimension])
    counts = lax.broadcasted_iota(counter, shape, dimension) + begin.astype(counter)
    return (counts.astype(dtype),)


@localizes("argmax", "argmin")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """The least position in this piece that has the element which is looked for; no number is equal to itself."""
    (x, extreme), (axis,), dtype = operands, cut.params["axes"], np.dtype(cut.params["index_dtype"])
    axes = cut.placement.operands[0].dims[axis]
    if not axes:
        return rebind(cut, operands)
    is_there = (x == lax.expand_dims(extreme, (axis,))) | (x != x)
    positions = lax.broadcasted_iota(dtype, x.shape, axis) + offset(cut, axes, x.shape[axis], dtype)
    return (lax.reduce_min(jnp.where(is_there, positions, np.iinfo(dtype).max), (axis,)),)


@localizes("gather")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """The gather of one device, which gives zeros for the indices of others along a selected dimension that is cut.

    An index that is out of bounds for the whole operand is the first device's to fill.
    """
    source, indices = operands
    numbers, spec, slices = cut.params["dimension_numbers"], cut.placement.operands[0], cut.params["slice_sizes"]
    pairs = zip(slices, source.shape, spec.dims, strict=True)
    sizes = tuple(local if axes and size > 1 else size for size, local, axes in pairs)
    selected = tuple(axis for d in numbers.start_index_map for axis in spec.dims[d])
    if not selected:
        return rebind(cut, operands, slice_sizes=sizes)
    clamps = _mode(cut) in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
    mine, is_outside = _shifted(cut, indices, numbers.start_index_map, slices, clamps=clamps)
    dropping: dict[str, Any] = {"mode": GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
    (gathered,) = rebind(cut, (_settled(source, mine), mine), slice_sizes=sizes, **dropping)
    if _mode(cut) != GatherScatterMode.FILL_OR_DROP:
        return (gathered,)
    is_first = piece_index(selected, cut.mesh, cut.coordinate) == 0
    outside = lax.expand_dims(is_outside, numbers.offset_dims)
    return (jnp.where(outside & is_first, _fill(cut.params["fill_value"], gathered.dtype), gathered),)


@localizes("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """The scatter of one device; along a selected dimension that is cut, updates of other devices are dropped."""
    target, indices, updates = operands
    numbers = cut.params["dimension_numbers"]
    indexed = numbers.scatter_dims_to_operand_dims
    if not any(cut.placement.operands[0].dims[d] for d in indexed):
        return rebind(cut, operands)
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    extents = iter(updates.shape[d] for d in numbers.update_window_dims)
    window = [1 if d in single else next(extents) for d in range(target.ndim)]
    mine, _ = _shifted(cut, indices, indexed, window, clamps=_mode(cut) == GatherScatterMode.CLIP)
    return rebind(cut, (_settled(target, mine), mine, updates), mode=GatherScatterMode.FILL_OR_DROP)


@localizes("dynamic_update_slice")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """Along a dimension that is cut, the part of the update that falls into this piece.

    A window of the piece, of no more than the update's extent, is read, and written again with that part in it.
    """
    target, update, *starts = operands
    dims, wholes, extents = cut.placement.operands[0].dims, cut.operands[0].shape, cut.operands[1].shape
    parted = [d for d, axes in enumerate(dims) if axes and extents[d] < wholes[d]]
    if not parted:
        return rebind(cut, operands)
    starts = [_signed(start[None], [whole])[0] for start, whole in zip(starts, wholes, strict=True)]
    is_ours = jnp.bool_(True)
    for d in parted:
        extent, rows, window = extents[d], target.shape[d], min(extents[d], target.shape[d])
        start = jnp.clip(starts[d], 0, wholes[d] - extent) - offset(cut, dims[d], rows, starts[d].dtype)
        starts[d] = jnp.clip(start, 0, rows - window)
        from_update = lax.iota(start.dtype, window) + (starts[d] - start)
        update = jnp.take(update, from_update, axis=d, mode="clip")
        is_in_update = (from_update >= 0) & (from_update < extent)
        is_ours &= lax.expand_dims(is_in_update, [other for other in range(target.ndim) if other != d])
    update = jnp.where(is_ours, update, lax.dynamic_slice(target, starts, update.shape))
    return rebind(cut, (target, update, *starts))


def _settled(piece: jax.Array, indices: jax.Array) -> jax.Array:
    """A piece behind a barrier, where there is a single index.

    XLA would merge the slice that made the piece with the one that reads it, and forget that the inner one clamps: an
    index beyond the piece would read and write the wrong rows (openxla/xla#49121, jax-ml/jax#40849). With several
    indices there is no slice. A barrier keeps a scatter's zeros in memory, as large as the logits where labels are
    scattered.
    """
    return lax.optimization_barrier(piece) if math.prod(indices.shape[:-1]) == 1 else piece


def _shifted(
    cut: Cut, indices: jax.Array, indexed: Sequence[int], window: Sequence[int], *, clamps: bool
) -> tuple[jax.Array, jax.Array]:
    """Indices into this device's piece, out of bounds for elements of other pieces, and which of them are outside the
    whole operand.

    `indexed` are the operand's dimensions that the last dimension of `indices` selects from, `window` the extents taken
    along every dimension; indices outside the whole are brought to its edge if the operation `clamps`. A shift keeps
    sorted indices sorted and unique ones unique.
    """
    shape, spec = cut.operands[0].shape, cut.placement.operands[0]
    wide = _signed(indices, [shape[d] for d in indexed])
    last = np.asarray([shape[d] - window[d] for d in indexed], wide.dtype)
    if clamps:
        wide = jnp.clip(wide, 0, last)
    local = spec.local_shape(shape, cut.mesh)
    begins = [offset(cut, spec.dims[d], local[d], wide.dtype) for d in indexed]
    return wide - jnp.stack(begins), ((wide < 0) | (wide > last)).any(-1)


def _mode(cut: Cut) -> GatherScatterMode:
    return GatherScatterMode.from_any(cut.params["mode"])


def _signed(indices: jax.Array, wholes: Sequence[int]) -> jax.Array:
    """Indices in a type that can be shifted below zero; indices that were out of bounds still are."""
    if np.issubdtype(indices.dtype, np.unsignedinteger):
        largest = np.iinfo(indices.dtype).max
        indices = jnp.minimum(indices, np.asarray([min(extent, largest) for extent in wholes], indices.dtype))
    return indices.astype(np.int64 if indices.dtype.itemsize == 8 else np.int32)


def _fill(value: Any, dtype: Any) -> Any:
    """The value of a gather at an index out of bounds: `value`, or JAX's default for the dtype."""
    if value is not None:
        return np.asarray(value).astype(dtype)
    if jnp.issubdtype(dtype, np.inexact):
        return jnp.asarray(np.nan, dtype)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if jnp.issubdtype(dtype, np.signedinteger) else info.max, dtype)


@localizes("ragged_dot_general")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """The product of these rows, whose groups are what falls into this piece of the groups of all rows."""
    lhs, rhs, sizes = operands
    numbers = cut.params["ragged_dot_dimension_numbers"]
    (ragged,), (_, batch) = numbers.lhs_ragged_dimensions, numbers.dot_dimension_numbers
    axes, extent = cut.placement.operands[0].dims[ragged], lhs.shape[ragged]
    if axes and ragged not in batch[0]:
        counter = np.int64 if sizes.dtype.itemsize == 8 else np.int32  # in which what begins before this is below zero
        ends = jnp.cumsum(sizes, -1, dtype=sizes.dtype).astype(counter) - offset(cut, axes, extent, counter)
        sizes = jnp.diff(jnp.clip(ends, 0, extent), axis=-1, prepend=0)
    return rebind(cut, (lhs, rhs, sizes))


@localizes("conv_general_dilated")
def _(cut: Cut, operands: Arrays) -> Arrays:
    return rebind(cut, operands, **group_counts(cut, operands))


def group_counts(cut: Cut, operands: Arrays) -> dict[str, int]:
    """The numbers of groups of a convolution of these pieces, by the names of its parameters.

    Groups are cut with the left side's features or batch, whichever they divide.
    """
    batch, feature = cut.params["dimension_numbers"].lhs_spec[:2]
    shape, local = cut.operands[0].shape, operands[0].shape
    counts = {"feature_group_count": feature, "batch_group_count": batch}
    return {name: cut.params[name] * local[d] // shape[d] for name, d in counts.items() if cut.params[name] > 1}


@localizes("random_bits")
def _(cut: Cut, operands: Arrays) -> Arrays:
    """Each element's bits are the hash of its position in all that its key draws, so a piece is drawn from its own
    positions. Where whole keys are cut alone, each draws what it did.

    Reference: JAX, `jax_threefry_partitionable`; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    keys, spec = operands[0], cut.placement.results[0]
    if not any(spec.dims[keys.ndim :]):
        return rebind(cut, operands)
    if not cast("Any", jax.config).jax_threefry_partitionable:
        rule = (
            "with jax_threefry_partitionable off, each bit depends on the whole shape and pieces cannot be drawn alone"
        )
        remedy = 'drop jax.config.update("jax_threefry_partitionable", False); on is JAX\'s default'
        raise UnsupportedError(explain(f"random bits {cut.results[0]}", rule, cut.node.source, remedy))
    (type,), local, width = cut.results, cut.local_shape(), cut.params["bit_width"]
    inner = slice(keys.ndim, None)  # the dimensions that one key draws
    cuts = zip(spec.dims[inner], local[inner], strict=True)
    begins = [offset(cut, axes, extent, np.uint32) for axes, extent in cuts]
    counts = positions(type.shape[inner], begins, local[inner])
    words = jax.random.key_data(keys)
    each: list[Any] = [words[..., 0], words[..., 1], *counts]
    if keys.ndim:  # the words of one key stay two numbers, which take no memory
        each[:2] = (lax.expand_dims(half, range(keys.ndim, len(local))) for half in each[:2])
        each = [jnp.broadcast_to(x, local) for x in each]
    high, low = jax_compat.threefry2x32_p.bind(*each)
    dtype = jnp.dtype(type.dtype)
    if width == 64:
        return (lax.shift_left(high.astype(dtype), jnp.asarray(32, dtype)) | low.astype(dtype),)
    return ((high ^ low).astype(dtype),)


def positions(
    shape: tuple[int, ...], begins: Sequence[jax.Array], extents: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The row-major position in an array of `shape` of each element of a block, as uint32 halves (high, low).

    Positions build up a dimension at a time, so only the last one costs work on every element.
    """
    high = low = jnp.zeros((1,) * len(shape), np.uint32)
    for d, (size, begin, extent) in enumerate(zip(shape, begins, extents, strict=True)):
        high, low = _multiply(high, low, size)
        along = tuple(extent if i == d else 1 for i in range(len(shape)))
        counts = lax.broadcasted_iota(np.uint32, along, d) + begin
        total = low + counts
        high, low = high + (total < counts).astype(np.uint32), total
    return jnp.broadcast_to(high, extents), jnp.broadcast_to(low, extents)


def _multiply(high: jax.Array, low: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) times `factor` modulo 2^64, by 16-bit digits: 64-bit integers are off by default in JAX."""
    if factor >= 1 << 32:
        raise InternalError(f"random bits along a dimension of {factor}")
    top, bottom = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    upper, lower = low >> 16, low & np.uint32(0xFFFF)
    middle = upper * bottom + (lower * bottom >> 16)
    cross = lower * top + (middle & np.uint32(0xFFFF))
    carried = upper * top + (middle >> 16) + (cross >> 16)
    return high * np.uint32(factor) + carried, low * np.uint32(factor)
