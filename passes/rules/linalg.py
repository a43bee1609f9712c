"""Rules of matrix products."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from passes.ir import Node
from passes.rules.registry import ShardingRule, Types, build, rule, size_of


@rule("dot_general")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Batch and free dimensions pass through, contracted ones reduce; 2 flops a multiply-add."""
    contract, batch = cast("tuple[tuple[tuple[int, ...], ...], ...]", node.params["dimension_numbers"])
    left, right = operands
    left_labels: list[str] = [f"m{d}" for d in range(left.rank)]
    right_labels: list[str] = [f"n{d}" for d in range(right.rank)]
    for kind, pairs in (("k", contract), ("b", batch)):
        for i, (in_left, in_right) in enumerate(zip(*pairs, strict=True)):
            left_labels[in_left] = right_labels[in_right] = f"{kind}{i}"
    shared = [f"b{i}" for i in range(len(batch[0]))]
    free = [label for label in (*left_labels, *right_labels) if label[0] in "mn"]
    contracted: dict[Hashable, str] = {f"k{i}": "add" for i in range(len(contract[0]))}
    depth = size_of([left.shape[d] for d in contract[0]])
    return build(
        [(left, left_labels), (right, right_labels)],
        [(results[0], [*shared, *free])],
        reduce=contracted,
        flops=2.0 * results[0].size * depth,
        light=False,
    )
