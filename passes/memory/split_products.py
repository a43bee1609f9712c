"""Products that XLA's GPU compiler computes in parts of the contracted dimension, which are added in float32.

A product with too few tiles for all multiprocessors is split until its estimated cost is least; all its parts are in
memory at once.

Reference: XLA's SplitkRewriter, `EstimateGemmCostAfterSplitK`, with the weights that it has for each generation, as of
jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast

from passes.ir import item_nbytes
from passes.memory.gpu_cycles import H100, Arithmetic
from passes.memory.operations import Operation, Shape

TILE = 128
"""The rows and columns of a product that one multiprocessor computes at a time: XLA's `kMTileSize` and `kNTileSize`."""

SPLITS = tuple(2**power for power in range(12))
"""The numbers of parts that XLA tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A GPU's multiprocessors, and XLA's weights of memory traffic, of the sum's traffic, and of its launch; that of a
    flop is 100. From Hopper on there is arithmetic on bfloat16, and XLA hides the latency of collectives.
    """

    cores: int
    memory: float
    sum_memory: float
    sum_launch: float
    arithmetic: Arithmetic
    from_hopper: bool = True


FLOP = 100.0
"""The weight of a flop beside `Weights`: XLA's `compute_cost_weight`, equal for all generations."""

_AMPERE = (0.0666955, 467.815, 5.65307e7)
_HOPPER = (0.194136, 193.1384, 4.36e7)
_BLACKWELL = (0.0848863, 189.711, 1.21563e8)
"""The weights of memory, of the sum's memory and of its launch in XLA's `GetCostWeights`, by generation."""


def _weights(cores: int, numbers: tuple[float, float, float], arithmetic: Arithmetic) -> Weights:
    memory, sum_memory, sum_launch = numbers
    return Weights(
        cores=cores,
        memory=memory,
        sum_memory=sum_memory,
        sum_launch=sum_launch,
        arithmetic=replace(arithmetic, cores=cores),
        from_hopper=numbers != _AMPERE,
    )


def _arithmetic(capability: tuple[int, int], cycles: float, nbytes: float) -> Arithmetic:
    return Arithmetic(capability=capability, cycles_per_second=cycles, bytes_per_second=nbytes)


WEIGHTS: Mapping[str, Weights] = MappingProxyType(
    {
        "v100": _weights(80, _AMPERE, _arithmetic((7, 0), 15.7e12, 0.90e12)),
        "a100": _weights(108, _AMPERE, _arithmetic((8, 0), 19.5e12, 2.04e12)),
        "h100": _weights(132, _HOPPER, H100),
        "h200": _weights(132, _HOPPER, replace(H100, bytes_per_second=4.80e12)),
        "b200": _weights(148, _BLACKWELL, _arithmetic((9, 0), 74.4e12, 7.67e12)),
        "gb200": _weights(152, _BLACKWELL, _arithmetic((9, 0), 80.2e12, 7.93e12)),
        "gb300": _weights(152, _BLACKWELL, _arithmetic((9, 0), 80.2e12, 8.00e12)),
        "l4": _weights(58, _AMPERE, _arithmetic((8, 6), 30.3e12, 0.30e12)),
        "a10g": _weights(80, _AMPERE, _arithmetic((8, 6), 35.0e12, 0.60e12)),
        "4090": _weights(128, _AMPERE, _arithmetic((8, 6), 82.6e12, 1.01e12)),
    }
)
"""The weights of each GPU, by its name up to a hyphen. What they compute and move in a second is data sheets';
Blackwell's cycles have not been looked up, and are Hopper's."""


def weights_of(device: str) -> Weights | None:
    """The weights of a GPU by its name; None for a device that is not known as one."""
    return WEIGHTS.get(device.split("-")[0])


def split(operations: Sequence[Operation], weights: Weights) -> tuple[list[Operation], list[int]]:
    """The operations with products in parts, each followed by its sum, and the new position of each old one."""
    changed: list[Operation] = []
    place: list[int] = []
    for operation in operations:
        moved = operation.reading(tuple([place[o] for o in operation.operands]))
        parts = _parts(operation, operations, weights) if operation.kind == "dot" else 1
        if parts > 1:
            changed.append(moved._replace(shape=(parts, *operation.shape), dtype="float32"))
            moved = moved._replace(kind="rearrange", operands=(len(changed) - 1,), tag=("sum", operation.tag))
        place.append(len(changed))
        changed.append(moved)
    return changed, place


def _parts(dot: Operation, operations: Sequence[Operation], weights: Weights) -> int:
    """The number of parts of a product in which it costs least."""
    sides = _sides(dot, operations)
    if sides is None or not dot.dtype.startswith(("float", "bfloat")):
        return 1
    return min(SPLITS, key=lambda parts: _cost(*sides, item_nbytes(dot.dtype), parts, weights))


def _sides(dot: Operation, operations: Sequence[Operation]) -> tuple[int, int, int, int, int] | None:
    """The batch, rows, columns and contracted elements of a product, and the bytes of its operands' elements."""
    lhs, rhs = operations[dot.operands[0]], operations[dot.operands[-1]]
    tag = cast("tuple[object, ...]", dot.tag)
    if tag and tag[0] == "merged":
        # both are in (batch, free, contracted) order
        rows, inner, columns = lhs.shape[-2], lhs.shape[-1], rhs.shape[-1]
        batch = math.prod(lhs.shape[:-2])
    else:
        contracted, batched = cast("tuple[tuple[Shape, Shape], tuple[Shape, Shape]]", tag)
        if len(contracted[0]) != 1:
            return None
        inner = lhs.shape[contracted[0][0]]
        batch = math.prod(lhs.shape[d] for d in batched[0])
        rows, columns = lhs.size // max(1, batch * inner), rhs.size // max(1, batch * inner)
    if len(dot.operands) > 2:  # one of the sides is several arrays
        rows, columns = dot.shape[-2:]
    return batch, rows, columns, inner, item_nbytes(lhs.dtype) + item_nbytes(rhs.dtype)


def _cost(
    batch: int, rows: int, columns: int, inner: int, operand_nbytes: int, item: int, parts: int, weights: Weights
) -> float:
    """XLA's estimate of a product in parts."""
    row_tile, column_tile = min(rows, TILE), min(columns, TILE)
    tiles = batch * parts * -(-rows // TILE) * -(-columns // TILE)
    slots = weights.cores * TILE * TILE / max(1, row_tile * column_tile)
    waves = max(1.0, tiles / slots)
    compute = 2.0 * row_tile * column_tile * -(-inner // parts) * waves * FLOP
    read = (rows + columns) * inner * batch * operand_nbytes / 2
    made = rows * columns * batch
    written = made * parts * (4 if parts > 1 else item)
    cost = max(compute, (read + written) * weights.memory)
    if parts == 1:
        return cost
    return cost + weights.sum_launch + (made * parts * 4 + made * item) * weights.sum_memory
