"""Rules of matrix products, decompositions and transforms."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import cast

from passes.ir import Node, TensorType
from passes.rules.registry import ShardingRule, Types, build, rule, size_of


@rule("dot_general")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Batch and free dimensions pass through, contracted ones reduce; 2 flops a multiply-add."""
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
        flops=2.0 * results[0].size * depth,
        light=False,
    )


@rule("ragged_dot_general")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Rows of one side in groups, each multiplied by a matrix of its own: as a product, but that groups stay whole.

    Cut rows are those of other groups on each device, whose sizes there follow from those of all. The groups' own
    dimension stays whole: which rows a group has is known only when it runs. A multiply-add of rows and the matrix of
    their group is 2 flops; XLA:CPU, which multiplies all rows by all matrices, takes as many times more as there are
    groups.
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
    return replace(base, localized=True)


_DECOMPOSITIONS = {
    "cholesky": 1 / 3, "eig": 25, "eigh": 9, "hessenberg": 10 / 3, "householder_product": 4 / 3, "lu": 2 / 3,
    "qr": 4 / 3, "schur": 25, "svd": 22, "tridiagonal": 4 / 3,
}  # fmt: skip
"""Primitive -> flops over n^3 for an n by n matrix.

Reference: Golub and Van Loan, "Matrix computations" (4th ed.), the counts after each algorithm.
"""


@rule(*_DECOMPOSITIONS)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Matrices of a batch are independent; one matrix stays whole."""
    *batch, rows, columns = operands[0].shape
    flops = _DECOMPOSITIONS[node.primitive] * size_of(batch) * rows * columns * min(rows, columns)
    return _in_batches(len(batch), operands, results, flops)


@rule("triangular_solve")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Right-hand sides are independent too: columns of b in a x = b, rows of b in x a = b."""
    matrix, sides = operands
    batch = range(matrix.rank - 2)
    around = (None, "side") if node.params["left_side"] else ("side", None)
    return build(
        [(matrix, [*batch, None, None]), (sides, [*batch, *around])],
        [(results[0], [*batch, *around])],
        flops=float(sides.size * matrix.shape[-1]),
        light=False,
    )


@rule("tridiagonal_solve")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Three diagonals [..., n] and the right-hand sides [..., n, sides]: 3 flops a row to eliminate, 5 to solve."""
    *diagonals, sides = operands
    batch = range(sides.rank - 2)
    return build(
        [*((t, [*batch, None]) for t in diagonals), (sides, [*batch, None, "side"])],
        [(results[0], [*batch, None, "side"])],
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
    base = _in_batches(batch, operands, results, 5.0 * count * points * math.log2(max(points, 2)))
    return replace(base, in_rows=True)


def _in_batches(batch: int, operands: Types, results: Types, flops: float) -> ShardingRule:
    """The rule of an operation that maps over the first `batch` dimensions of everything."""

    def labelled(types: Types) -> list[tuple[TensorType, list[int | None]]]:
        return [(t, [d if d < batch else None for d in range(t.rank)]) for t in types]

    return build(labelled(operands), labelled(results), flops=flops, light=False)
