"""Seconds of operators under a sharding, by a roofline of flops and bytes plus the time of a kernel launch.

Reference: Williams, Waterman and Patterson, "Roofline" (CACM 2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from passes.cluster import DeviceSpec, Mesh
from passes.ir import TensorType
from passes.memory import is_tpu
from passes.rules import Assignment, ShardingRule
from passes.solver import Floats

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
"""Rows and columns of the tiles in which a GPU's library multiplies, with the share of the best rate that it reaches
on them: the smaller a tile, the more is read for each product.

Reference: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantization).
"""

CORE_FLOPS_PER_SECOND = 0.3e12
"""The rate of a GPU core in float32 without tensor cores, which libraries of solves and decompositions do not use: by
data sheets 0.18 TFLOP/s on A100 and 0.2 on V100, 0.5 on H100, L4 and B200, 0.65 on 4090.
"""

SMALL = 128
"""The columns of a float32 matrix of 64 KiB, which fits into the memory of one core (96 KiB on V100, 164 on A100): of
64 such matrices a Cholesky takes 0.13 ms on L40S, of 16 with 512 columns 0.66 (ml-explore/mlx#4262)."""


def group_seconds(device: DeviceSpec, dtype: str, flops: Floats, nbytes: Floats, rearranging_seconds: Floats) -> Floats:
    """Seconds of one operator group: the larger of compute and memory time, what rearranging takes, and one launch.

    The arrays are the work of one device, of any shape: that of one layout, or of every strategy of the group.
    """
    computing = flops / device.matmul_flops_per_second(dtype)
    passing = nbytes / device.achieved_bytes_per_second
    return np.maximum(computing, passing) + rearranging_seconds + device.launch_seconds


def is_no_kernel(rules: Sequence[ShardingRule], device: DeviceSpec) -> bool:
    """Whether an operator group needs no kernel: it only permutes dimensions, and XLA gives its neighbours such
    layouts, or only gives elements in their order in memory other dimensions, which a TPU's tiles do not keep, or takes
    arrays out of a stack, of which kernels of XLA:GPU read what they need.
    """
    is_as_it_lies = not is_tpu(device) and all(rule.regroups or rule.picks or rule.is_bound for rule in rules)
    return is_as_it_lies or all(rule.is_layout for rule in rules)


def local_flops(rule: ShardingRule, assignment: Assignment, mesh: Mesh) -> float:
    """The flops of one device under an assignment; only factors on a dimension divide the work.

    Slow shapes of products, and fast convolutions, count as the flops that a large product computes in the same time.
    """
    device = mesh.cluster.group().device
    parts = pieces(rule, assignment, mesh)
    if in_columns := _in_columns(rule, parts, device):
        return in_columns * device.matmul_flops_per_second("float32")
    flops = computed_flops(rule, device) / math.prod(parts.values())
    flops /= device.convolution_efficiency if rule.convolves else 1.0
    if not _is_slowed(rule, device):
        return flops
    rows, columns, inner = extents(rule, parts)
    if device.cores:
        return flops / _share(device.cores, device.half_inner, batch_size(rule, parts), rows, columns, inner)
    return flops * math.prod(1 + device.half_extent / extent for extent in (rows, columns, inner))


def computed_flops(rule: ShardingRule, device: DeviceSpec) -> float:
    """The flops that an operator computes; JAX and XLA multiply each row by the matrices of all groups on CPUs and
    GPUs, and a kernel of attention leaves out what a mask hides.

    Reference: `_ragged_dot_general_lower` of jax/_src/lax/lax.py (jax 0.10), and what XLA:GPU compiles on an H100.
    """
    return rule.flops * (rule.attends or 1.0) * (1 if is_tpu(device) else rule.groups)


def computing_dtype(reads: Sequence[TensorType], writes: Sequence[TensorType]) -> str:
    """The dtype in which an operator computes: that of its first operand or, if it has none, of its result."""
    return next((type.dtype for type in (*reads, *writes)), "float32")


def pieces(rule: ShardingRule, assignment: Assignment, mesh: Mesh) -> dict[int, int]:
    """Factor -> the number of pieces that an assignment cuts it into, for factors on a dimension."""
    parts = dict[int, int]()
    for axis, factor in assignment:
        if rule.factors[factor].size:
            parts[factor] = parts.get(factor, 1) * mesh.axis_size(axis)
    return parts


def times_made(types: Sequence[TensorType]) -> int:
    """The number of times that a product with these results is computed: twice for scores whose gradients are fused."""
    return max([1, *(type.fused for type in types)])


def has_own_rate(rule: ShardingRule, mesh: Mesh) -> bool:
    """Whether an operator computes at another rate than large products do: as a convolution, or due to its shape."""
    device = mesh.cluster.group().device
    is_in_columns = rule.columns is not None and device.cores > 0
    return (rule.convolves and device.convolution_efficiency != 1.0) or is_in_columns or _is_slowed(rule, device)


def _in_columns(rule: ShardingRule, parts: Mapping[int, int], device: DeviceSpec) -> float:
    """The seconds of a decomposition or solve on a GPU, which takes a matrix column by column; 0 of other operators.

    Matrices of up to `SMALL` columns are computed side by side, one a core. Others take turns: LU of 4 and 8 matrices
    of 512 columns takes 17 and 34 ms (pytorch/pytorch#56887). Of TPUs and CPUs we know no publication that times them:
    there they compute at the rate of products.
    """
    columns = rule.columns
    if columns is None or not device.cores:
        return 0.0
    matrices = math.prod(rule.factors[f].size / parts.get(f, 1) for f in rule.operands[0] if f >= 0)
    turns = math.ceil(matrices / device.cores) if columns.count <= SMALL else matrices
    rate = min(device.cores * CORE_FLOPS_PER_SECOND, device.matmul_flops_per_second("float32"))
    computing = rule.flops / math.prod(parts.values()) / rate
    reading = matrices * columns.nbytes / device.achieved_bytes_per_second
    return computing + reading + turns * columns.count * columns.seconds


def _is_slowed(rule: ShardingRule, device: DeviceSpec) -> bool:
    """Whether an operator is a product on a device where its shape matters.

    Convolutions are no tiled products on GPUs, whose libraries have other algorithms for them (Winograd, FFT), and no
    measurement that we know of says how their shapes matter: all reach what large products do. Products of vectors are
    sums in XLA, which take as long as reading them.

    Reference: `GpuAlgebraicSimplifierVisitor::ShouldStrengthReduceDotToReduce` of XLA.
    """
    is_tiled = device.cores and rule.window == 1.0
    is_heavy = not rule.light and rule.flops and not rule.columns
    is_sum = device.cores and rule.is_product and extents(rule, {})[:2] == (1, 1)
    return bool((device.half_extent or is_tiled) and is_heavy and len(rule.operands) == 2 and not is_sum)


@lru_cache(maxsize=1 << 14)
def _share(cores: int, half_inner: float, batch: float, rows: float, columns: float, inner: float) -> float:
    """The share of the best rate that a product reaches on a GPU, whose library chooses the tile.

    Tiles are whole, and so are the waves in which cores take them; each tile begins and ends in the time of
    `half_inner` steps along the inner dimension. If there are few tiles, they are cut along the inner dimension, too,
    so that every core has one.
    """
    best = 0.0
    for high, wide, rate in TILES:
        down, across = math.ceil(rows / high), math.ceil(columns / wide)
        filled = rows * columns / (down * high * across * wide)
        tiles = batch * down * across
        for cuts in (1, 2, 4, 8) if tiles < cores else (1,):
            waves = tiles * cuts / cores
            steps = inner / cuts
            best = max(best, rate * filled * waves / math.ceil(waves) * steps / (steps + half_inner))
    return best


def batch_size(rule: ShardingRule, parts: Mapping[int, int]) -> float:
    """The number of products that one device computes side by side."""
    both = set(rule.operands[0]).intersection(rule.operands[1], rule.results[0]) - {-1}
    return math.prod(rule.factors[f].size / parts.get(f, 1) for f in both)


def extents(rule: ShardingRule, parts: Mapping[int, int]) -> tuple[float, float, float]:
    """(rows, columns, inner dimension) of one device's product of two operands, without the batch dimensions.

    A convolution counts as the product that it is computed as: positions of its result are rows, and every place of its
    window adds to the inner dimension. The window of a gradient of weights is as large as an image.
    """
    lhs, rhs, out = (
        {f for f in dims if f >= 0 and rule.factors[f].size}
        for dims in (rule.operands[0], rule.operands[1], rule.results[0])
    )

    def extent(factors: set[int]) -> float:
        return math.prod(rule.factors[f].size / parts.get(f, 1) for f in factors)

    named = math.prod(rule.factors[f].size for f in lhs | rhs | out)
    positions = max(rule.flops / (2 * named) / rule.window, 1.0)
    rows, inner = extent((lhs & out) - rhs) * positions, extent((lhs & rhs) - out) * rule.window
    return rows, extent((rhs & out) - lhs), inner
