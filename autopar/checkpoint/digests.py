"""Digests of arrays that do not depend on how arrays are sharded: a sum over elements, each mixed with its index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

_CHUNK = 1 << 15
"""Elements that are mixed at once: their numbers, 256 KiB, stay in a core's cache, while NumPy is called only a few
times.
"""

# Odd, so that multiplying by them loses nothing.
_VALUE, _PLACE, _MIX = map(np.uint64, (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))
_SHIFT = np.uint64(32)

Piece = tuple[tuple[int, ...], np.ndarray]
"""A part of an array in the host's memory, with the index at which it begins."""


def pieces_of(leaf: Any, *, is_global: bool) -> list[Piece]:
    """The parts of a leaf that this process accounts for.

    Of equal shards of a global array, one process accounts for each; the first process accounts for what every process
    has whole.
    """
    if not is_global:
        array = np.asarray(leaf)
        return [((0,) * array.ndim, array)] if jax.process_index() == 0 else []
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    for shard in shards:
        shard.data.copy_to_host_async()
    return [
        (
            tuple(part.indices(size)[0] for part, size in zip(shard.index, leaf.shape, strict=True)),
            np.asarray(shard.data),
        )
        for shard in shards
    ]


def partial_sum(pieces: Iterable[Piece], shape: Sequence[int]) -> int:
    """The sum over the elements of these parts of an array of this shape, modulo 2^64."""
    total = 0
    for start, part in pieces:
        for places, values in _chunks(start, part, shape):
            values *= _VALUE
            values ^= places
            values ^= np.right_shift(values, _SHIFT, out=places)
            values *= _MIX
            values ^= np.right_shift(values, _SHIFT, out=places)
            total += int(np.add.reduce(values, axis=None, dtype=np.uint64))
    return total % 2**64


def digest(sums: Iterable[int]) -> str:
    """16 hex digits of an array, from the sums of its parts."""
    return f"{sum(sums) % 2**64:016x}"


def _chunks(start: Sequence[int], part: np.ndarray, shape: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(mixed indices in the whole array, bits of the elements), in chunks: both may be written to."""
    if part.size == 0:
        return
    columns = part.shape[-1] if part.ndim else 1
    first = np.zeros((), np.uint64)
    for axis, size in enumerate(part.shape[:-1]):
        stride = np.uint64(math.prod(shape[axis + 1 :]))
        first = np.add.outer(first, np.arange(start[axis], start[axis] + size, dtype=np.uint64) * stride)
    # A place is the sum of a row's and a column's, and multiplying may come before adding, modulo 2^64.
    rows, flat = first.reshape(-1, 1) * _PLACE, part.reshape(-1, columns)
    offset = (np.arange(columns, dtype=np.uint64) + np.uint64(start[-1] if start else 0)) * _PLACE + _PLACE
    height, width = max(1, _CHUNK // columns), min(columns, _CHUNK)
    for top in range(0, len(rows), height):
        for column in range(0, columns, width):
            here = flat[top : top + height, column : column + width]
            yield rows[top : top + height] + offset[column : column + width], _bits(here)


def _bits(values: np.ndarray) -> np.ndarray:
    """The bits of elements as 64-bit numbers; halves of wider elements are mixed."""
    size = values.dtype.itemsize
    if size == 16:
        halves = np.ascontiguousarray(values).view(np.uint64).reshape(*values.shape, 2)
        return halves[..., 0] * _MIX + halves[..., 1]
    return np.ascontiguousarray(values).view(f"u{size}").astype(np.uint64)
