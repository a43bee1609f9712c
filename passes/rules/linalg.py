"""Rules of matrix products, decompositions and transforms."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from passes.ir import Node, TensorType, item_nbytes
from passes.rules.columns import Columns
from passes.rules.registry import build, rule, size_of
from passes.rules.sharding_rule import ShardingRule, Types


@rule("dot_general")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Batch and free dimensions pass through, contracted ones reduce; 2 flops a multiply-add. Sums of whole numbers may
    run over where the products of their summands, which are wider, do not.
    """
    contract, batch = cast("tuple[tuple[tuple[int, ...], ...], ...]", node.params["dimension_numbers"])
    lhs, rhs = operands
    left_labels: list[str] = [f"m{d}" for d in range(lhs.rank)]
    right_labels: list[str] = [f"n{d}" for d in range(rhs.rank)]
    for kind, pairs in (("k", contract), ("b", batch)):
        for i, (in_left, in_right) in enumerate(zip(*pairs, strict=True)):
            left_labels[in_left] = right_labels[in_right] = f"{kind}{i}"
    shared = [f"b{i}" for i in range(len(batch[0]))]
    free = [label for label in (*left_labels, *right_labels) if label[0] in "mn"]
    contracted: dict[Hashable, str] = {f"k{i}": "add" for i in range(len(contract[0]))}
    depth = size_of([lhs.shape[d] for d in contract[0]])
    return build(
        [(lhs, left_labels), (rhs, right_labels)],
        [(results[0], [*shared, *free])],
        reduce=contracted,
        linear=((0,), (1,)) if lhs.is_inexact and rhs.is_inexact else (),
        flops=2.0 * results[0].size * depth,
        light=False,
    )


@rule("ragged_dot_general")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Rows of one side in groups, each multiplied by a matrix of its own: as a product, but that groups stay whole.

    Cut rows are those of other groups on each device, whose sizes there follow from those of all. The groups' own
    dimension stays whole: which rows a group has is known only when it runs. A multiply-add of rows and the matrix of
    their group is 2 flops.
    """
    numbers = cast("Mapping[str, tuple[int, ...]]", node.params["ragged_dot_dimension_numbers"])
    contract, batch = cast("tuple[tuple[tuple[int, ...], ...], ...]", numbers["dot_dimension_numbers"])
    (ragged,) = numbers["lhs_ragged_dimensions"]
    lhs, rhs, sizes = operands
    of_lhs: list[str | None] = [f"m{d}" for d in range(lhs.rank)]
    of_rhs: list[str | None] = [None if d in numbers["rhs_group_dimensions"] else f"n{d}" for d in range(rhs.rank)]
    for kind, pairs in (("k", contract), ("b", batch)):
        for i, (in_left, in_right) in enumerate(zip(*pairs, strict=True)):
            of_lhs[in_left] = of_rhs[in_right] = f"{kind}{i}"
    shared, contracted = ([f"{kind}{i}" for i in range(len(of[0]))] for kind, of in (("b", batch), ("k", contract)))
    rows, columns = ([label for label in labels if label and label[0] in "mn"] for labels in (of_lhs, of_rhs))
    groups = [None] if ragged in contract[0] else []
    # Sizes may differ along what lies outside of the rows in groups, which they then have too.
    around = shared if ragged in batch[0] else [*shared, *(contracted if groups else rows)]
    outer = around[: sizes.rank - 1]
    depth = size_of([lhs.shape[d] for d in contract[0]])
    base = build(
        [(lhs, of_lhs), (rhs, of_rhs), (sizes, [*outer, None])],
        [(results[0], [*groups, *shared, *rows, *columns])],
        reduce=dict.fromkeys(contracted, "add"),
        flops=2.0 * results[0].size * depth / (sizes.shape[-1] if groups else 1),
        light=False,
    )
    return replace(base, localized=True, groups=sizes.shape[-1] if ragged not in batch[0] else 1)


_DECOMPOSITIONS = {
    "cholesky": (1 / 3, 0.5e-6, 0), "eig": (25, 100e-6, 1 / 2), "eigh": (9, 10e-6, 1 / 3), "lu": (2 / 3, 10e-6, 0),
    "hessenberg": (10 / 3, 10e-6, 1 / 2), "householder_product": (4 / 3, 2e-6, 0), "qr": (8 / 3, 4e-6, 0),
    "schur": (25, 100e-6, 1 / 2), "svd": (22, 100e-6, 2 / 3), "tridiagonal": (4 / 3, 10e-6, 1 / 3),
}  # fmt: skip
"""Primitive -> (flops over n^3 for an n by n matrix, seconds that a GPU takes for each column, elements over n^3 that
it reads in products of what is left of the matrix with vectors).

Seconds are those that were published for float32, less what computing takes, over the columns: Cholesky of 512 to 4096
on L40S 0.36 to 0.58 us (ml-explore/mlx#4262); LU of 4096 on V100 and A100 10 us (jax-ml/jax#9694); QR with its Q, two
routines, of 16 and 32 on H100 4 to 6 us (pytorch/pytorch#173788) and of 64 4 us (flagos-ai/FlagGems#5586); SVD of 400
complex columns on A100 110 us (tensor4all/tenferro-rs#1849). The others are assumed: as LU where columns are reduced,
as SVD where rotations follow.

Elements: a column is reduced by one product with what is left of a symmetric matrix, two of a general one, and of all
rows for Hessenberg form. That is what holds an eigh on H100 below 3 % of its peak (Wang et al., "Extracting the
Potential of Emerging Hardware Accelerators for Symmetric Eigenvalue Decomposition", 2024).

Reference: Golub and Van Loan, "Matrix computations" (4th ed.), the counts after each algorithm.
"""

SOLVE_SECONDS = 0.5e-6
"""Seconds that a triangular solve takes for each column on a GPU: 0.65 us of 10,000 with one right-hand side on V100
(pytorch/pytorch#12683), 0.5 us of 128 and 256 (flagos-ai/FlagGems#5011, two solves). With many right-hand sides it is
made of products of blocks (Charara, Keyes and Ltaief, "Redesigning Triangular Dense Matrix Computations on GPUs",
Euro-Par 2016).
"""


@rule(*_DECOMPOSITIONS)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Matrices of a batch are independent; one matrix stays whole."""
    *batch, rows, columns = operands[0].shape
    flops, seconds, read = _DECOMPOSITIONS[node.primitive]
    cube, count = rows * columns * min(rows, columns), min(rows, columns)
    base = _in_batches(len(batch), operands, results, flops * size_of(batch) * cube)
    nbytes = read * cube * item_nbytes(operands[0].dtype)
    return replace(base, columns=Columns(count=count, seconds=seconds, nbytes=nbytes))


@rule("lu_pivots_to_permutation")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The order that a decomposition's exchanges of rows [..., exchanges] leave its rows [..., rows] in."""
    return _in_batches(operands[0].rank - 1, operands, results, float(operands[0].size))


@rule("triangular_solve")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Right-hand sides are independent too: columns of b in a x = b, rows of b in x a = b. Solutions of their sums are
    sums.
    """
    matrix, sides = operands
    batch = range(matrix.rank - 2)
    around = (None, "side") if node.params["left_side"] else ("side", None)
    base = build(
        [(matrix, [*batch, None, None]), (sides, [*batch, *around])],
        [(results[0], [*batch, *around])],
        linear=((1,),),
        flops=float(sides.size * matrix.shape[-1]),
        light=False,
    )
    return replace(base, columns=Columns(count=matrix.shape[-1], seconds=SOLVE_SECONDS))


@rule("tridiagonal_solve")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Three diagonals [..., n] and the right-hand sides [..., n, sides]: 3 flops a row to eliminate, 5 to solve."""
    *diagonals, sides = operands
    batch = range(sides.rank - 2)
    return build(
        [*((t, [*batch, None]) for t in diagonals), (sides, [*batch, None, "side"])],
        [(results[0], [*batch, None, "side"])],
        linear=((3,),),
        flops=8.0 * sides.size,
        light=False,
    )


@rule("fft")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """5 n log2 n flops a transform of n points (Cooley and Tukey)."""
    lengths = cast("tuple[int, ...]", node.params["fft_lengths"])
    points = size_of(lengths)
    batch = operands[0].rank - len(lengths)
    count = size_of(operands[0].shape[:batch])
    base = _in_batches(batch, operands, results, 5.0 * count * points * math.log2(max(points, 2)), linear=((0,),))
    return replace(base, in_rows=True)


def _in_batches(
    batch: int, operands: Types, results: Types, flops: float, linear: Sequence[tuple[int, ...]] = ()
) -> ShardingRule:
    """The rule of an operation that maps over the first `batch` dimensions of everything."""

    def labelled(types: Types) -> list[tuple[TensorType, list[int | None]]]:
        return [(t, [d if d < batch else None for d in range(t.rank)]) for t in types]

    return build(labelled(operands), labelled(results), flops=flops, light=False, linear=linear)
