"""The bytes of an array in a TPU's memory, which is made of tiles of 8 rows of 128 elements.

The compiler chooses which dimensions lie in tiles, so that as little as can be is padded; what has few rows lies in
tiles of as few (1, 2 or 4), and vectors in tiles of 1024 elements.

Reference: layouts in the HLO that libtpu 0.0.42 makes; "Array layout" and "Tiled layout" of the documentation of XLA.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import permutations

from passes.ir import item_nbytes
from passes.memory.operations import Operation

LANES, ROWS = 128, 8
"""The columns and the rows of a tile."""

VECTOR = 1024
"""The elements of a tile of a vector, or of a long one: shorter ones lie in tiles of `LANES`."""

BATCHED = 4
"""The dimensions from which on a product is one of several batches of matrices: windows and heads, for one."""

ALIGNMENT = 512
"""Bytes of which every place in memory is a multiple."""


def stored(operation: Operation) -> int:
    """The bytes of what an operation makes."""
    if operation.is_fused:
        return 0
    if operation.is_image and len(operation.shape) > 1:
        first, *between, last = operation.shape
        return min(
            nbytes((*between, *in_tiles(first, last)), operation.dtype),
            nbytes((*between, *in_tiles(last, first)), operation.dtype),
        )
    if operation.is_rows and operation.shape:
        *rows, columns = operation.shape
        return nbytes((math.prod(rows), _up(columns, LANES)), operation.dtype)
    if operation.is_batch and len(operation.shape) > 1:
        *batch, rows, columns = operation.shape
        padded = min(in_tiles(rows, columns), in_tiles(columns, rows), key=math.prod)
        return math.prod(batch) * nbytes(padded, operation.dtype)
    return nbytes(operation.shape, operation.dtype)


@lru_cache(maxsize=4096)
def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """The bytes of an array of this shape, padding included."""
    wide = [size for size in shape if size != 1]
    elements = 1
    for size in wide:
        elements *= size
    if len(wide) == 1:
        elements = _up(elements, VECTOR if elements > LANES * 4 else LANES)
    elif elements and wide:
        sizes = set(permutations(wide, 2))
        elements = min(elements // (rows * lanes) * math.prod(in_tiles(rows, lanes)) for rows, lanes in sizes)
    return _up(elements * item_nbytes(dtype), ALIGNMENT)


def in_tiles(rows: int, lanes: int) -> tuple[int, int]:
    """Rows and columns with the padding of their tiles."""
    return _padded_rows(rows), _up(lanes, LANES)


def _padded_rows(rows: int) -> int:
    return next((few for few in (1, 2, 4) if rows <= few), _up(rows, ROWS))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
