"""Seconds of putting arrays into the order in which an operator takes them, on devices where that is no free choice.

XLA's GPU and TPU compilers lay arrays out as their readers like them. On a CPU an array is copied for that, a few
elements of each cache line that is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.cluster import Mesh
from passes.intra_op.roofline import pieces
from passes.ir import TensorType
from passes.rules import Assignment, ShardingRule


def rearranging_seconds(rule: ShardingRule, reads: Sequence[TensorType], assignment: Assignment, mesh: Mesh) -> float:
    """The seconds in which one device rearranges its pieces of what an operator reads; 0 where that costs nothing."""
    rate = mesh.cluster.group().device.strided_bytes_per_second
    if not rate:
        return 0.0
    parts = pieces(rule, assignment, mesh)
    nbytes = 0.0
    for operand in rearranged(rule):
        nbytes += reads[operand].nbytes / math.prod(parts.get(factor, 1) for factor in rule.operands[operand])
    return nbytes / rate


def rearranged(rule: ShardingRule) -> tuple[int, ...]:
    """The operands that an operator takes in another order than they lie: a transpose's, and those of products side by
    side that hold a dimension of one product before one that numbers the products.

    A left operand with what is summed over first is not counted. Such a product alone takes 1.1 to 1.3 times as long
    (`python -m benchmarks.operators`), but charged for it, products of weights' gradients were predicted too slow.
    """
    if rule.permutes:
        return (0,)
    if not rule.is_product or rule.window > 1:
        return ()
    return tuple(operand for operand in (0, 1) if not _is_in_order(rule, operand))


def _is_in_order(rule: ShardingRule, operand: int) -> bool:
    other, result = rule.operands[1 - operand], rule.results[0]
    numbers = [factor in other and factor in result for factor in rule.operands[operand] if factor >= 0]
    return numbers == sorted(numbers, reverse=True)
