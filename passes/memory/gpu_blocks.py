"""The blocks of threads that kernels of XLA's GPU compiler have, of which a sum has few.

A multiprocessor that runs one block reads 32 bytes a cycle, so that few blocks leave memory idle, and fewer than there
are multiprocessors leave arithmetic idle. A sum of columns has one block for 32 of them, or 64 or 128 where each thread
adds up two or four; what adds up rows has several in one block. What is too long for that is added up in parts. All
other kernels have a thread for every element.

Reference: ReductionFusion of xla/backends/gpu/codegen/emitters/reduction.cc, GetVectorSizeForMlir and
IsReductionFasterThanElemental of reduction_utils.cc, AdjustBandwidth of gpu_performance_model_base.cc, jaxlib 0.10.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

from passes.memory.gpu_cycles import Arithmetic
from passes.memory.operations import Operation, Shape

ADDED = frozenset({"reduce-sum", "reduce-prod", "reduce-max", "reduce-min", "reduce-and", "reduce-or"})
"""Reductions along whole dimensions."""

THREADS, WARP = 128, 32
"""Threads of a block of most kernels, and of a warp: XLA's defaults and CUDA's."""

ROW_THREADS, ROW_ELEMENTS, MOST_ROW_THREADS = 256, 16, 1024
"""The threads that a block of row sums aims at, the elements that each adds up, and the most that add up one row:
`kThreadsPerBlockTarget`, `kMinorReducedElementsPerThread` and MinThreadsXRowReduction of XLA."""

COLUMN = 4096
"""Elements of a column that XLA adds up in one go: tiles of 128 by warps of 32 (ReductionDimensionRaceFreeBound in
reduction_utils.cc, as of jaxlib 0.10); TreeReductionRewriter cuts longer ones."""

ROW = 16384
"""Elements of a row that XLA adds up in one go, likewise: 1024 threads with 16 each."""

REREAD, REREAD_FAR = 20.0, 2.5
"""Times that what is read again comes faster, from a multiprocessor's own cache or from one behind it: XLA's
`kL2CacheSpeedup` times `kL1CacheSpeedup`, and the first alone."""


def blocks_of(operation: Operation, read: Operation, *, narrow: bool) -> int:
    """The blocks of the kernel of an operation that reads another one first, `narrow` where it reads what has 16 bits
    or fewer.
    """
    each = -(-operation.size // THREADS)
    if operation.kind != "reduce" or operation.name not in ADDED or by_threads(operation, read):
        return each
    major, added, minor = grouped(operation, read)
    if added > (ROW if minor == 1 else COLUMN):  # in about as many parts as each of them has elements
        major, added = major * math.isqrt(added), math.isqrt(added)
    if minor == 1:
        return _of_rows(major, added)
    if minor < WARP:
        return major
    vector = next((v for v in ((4, 2) if narrow else (2,)) if minor % (v * WARP) == 0), 1)
    return major * -(-minor // (WARP * vector))


def by_threads(operation: Operation, read: Operation) -> bool:
    """Whether one thread adds up each element of a sum, which is so short that more would be idle."""
    _, added, minor = grouped(operation, read)
    if added > (ROW if minor == 1 else COLUMN):
        added = math.isqrt(added)
    if minor == 1:
        return added < WARP
    return added < WARP or (added < 2 * WARP and minor < WARP) or (added < 4 * WARP and minor < 8)


def _of_rows(rows: int, elements: int) -> int:
    """The blocks that add up rows of so many elements."""
    threads = min(MOST_ROW_THREADS, -(-elements // (ROW_ELEMENTS * WARP)) * WARP)
    return -(-rows // max(1, ROW_THREADS // threads))


def grouped(operation: Operation, read: Operation) -> tuple[int, int, int]:
    """The elements before the last dimensions that are added up, along those and behind them."""
    shape, added = read.shape, frozenset(cast("tuple[str, Shape]", operation.tag)[1])
    last = max((d for d in added if shape[d] > 1), default=-1)
    first = last
    while first >= 0 and (first in added or shape[first] == 1):
        first -= 1
    major = math.prod(size for d, size in enumerate(shape[: first + 1]) if d not in added)
    return major, math.prod(shape[first + 1 : last + 1]), math.prod(shape[last + 1 :])


class Rates(NamedTuple):
    """The bytes that memory moves while a kernel reads one: first, and again from a near or a far cache."""

    first: float
    near: float
    far: float


def rates_of(arithmetic: Arithmetic, blocks: int) -> Rates:
    """The rates at which so many blocks read, relative to memory's."""
    idle = arithmetic.bytes_per_second / (max(1, blocks) * arithmetic.block_bytes_per_second)
    return Rates(max(1.0, idle), max(1 / REREAD, idle), max(1 / REREAD_FAR, idle))
