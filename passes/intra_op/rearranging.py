"""Seconds of putting arrays into the order in which an operator takes them, on devices where that is no free choice.

XLA's GPU and TPU compilers lay arrays out as their readers like them. On a CPU an array is copied for that, a few
elements of each cache line that is fetched; products side by side whose left operand has its rows last are taken one
by one; and a convolution is a product of patches, which are put together first, pixel after pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.cluster import DeviceSpec, Mesh
from passes.intra_op.roofline import batch_size, extents, pieces
from passes.ir import TensorType
from passes.rules import Assignment, ShardingRule


def rearranging_seconds(rule: ShardingRule, reads: Sequence[TensorType], assignment: Assignment, mesh: Mesh) -> float:
    """The seconds that one device spends on the order of its pieces of what an operator reads; 0 where it is free."""
    device = mesh.cluster.group().device
    parts, spent = pieces(rule, assignment, mesh), 0.0
    if device.strided_bytes_per_second:
        for operand in rearranged(rule):
            nbytes = reads[operand].nbytes / math.prod(parts.get(factor, 1) for factor in rule.operands[operand])
            spent += nbytes / device.strided_bytes_per_second
    if device.product_seconds and is_one_by_one(rule):
        spent += batch_size(rule, parts) * device.product_seconds
    if device.pixel_seconds and rule.window > 1:
        rows, _, _ = extents(rule, parts)
        spent += batch_size(rule, parts) * rows * rule.window * device.pixel_seconds
    return spent


def is_ordered(rule: ShardingRule, device: DeviceSpec) -> bool:
    """Whether the order of what an operator reads costs a device something."""
    if device.strided_bytes_per_second and rearranged(rule):
        return True
    if device.pixel_seconds and rule.window > 1:
        return True
    return device.product_seconds > 0 and is_one_by_one(rule)


def is_one_by_one(rule: ShardingRule) -> bool:
    """Whether an operator is products side by side whose left operand has its rows last: a right operand's gradient is.

    XLA:CPU (jaxlib 0.10.2) calls a library for each of these, and one kernel for all of them where what is summed over
    is last: `autopar measure` has 512 products of 8 x 8 x 8 take 1.5 ms so, and 0.13 ms otherwise.
    """
    if not rule.is_product or rule.window > 1:
        return False
    lhs, rhs, out = ([f for f in dims if f >= 0] for dims in (rule.operands[0], rule.operands[1], rule.results[0]))
    is_batch = any(factor in rhs and factor in out for factor in lhs)
    return is_batch and lhs[-1] in out and lhs[-1] not in rhs


def rearranged(rule: ShardingRule) -> tuple[int, ...]:
    """The operands that an operator takes in another order than they lie: a transpose's, those of products side by
    side that hold a dimension of one product before one that numbers the products, and those of convolutions whose
    channels do not come last, as in gradients.

    A left operand with what is summed over first is not counted. Such a product alone takes 1.1 to 1.3 times as long
    (`python -m benchmarks.operators`), but charged for it, products of weights' gradients were predicted too slow.
    """
    if rule.permutes:
        return (0,)
    if rule.convolves:
        return tuple(operand for operand in (0, 1) if not _has_channels_last(rule, operand))
    if not rule.is_product or rule.window > 1:
        return ()
    return tuple(operand for operand in (0, 1) if not _is_in_order(rule, operand))


def _has_channels_last(rule: ShardingRule, operand: int) -> bool:
    """Whether a convolution's images (operand 0) end in channels that its kernel has, or its kernel (1) in those of
    its result.
    """
    last = rule.operands[operand][-1]
    return last >= 0 and last in (rule.operands[1], rule.results[0])[operand]


def _is_in_order(rule: ShardingRule, operand: int) -> bool:
    other, result = rule.operands[1 - operand], rule.results[0]
    numbers = [factor in other and factor in result for factor in rule.operands[operand] if factor >= 0]
    return numbers == sorted(numbers, reverse=True)
