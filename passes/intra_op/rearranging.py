"""Seconds of bringing arrays into the order in which an operator reads them, on devices where that takes time.

XLA's GPU and TPU compilers choose the layout of an array to suit its readers. On a CPU the array is copied, a few
elements of each cache line at a time; batched products whose left operand has its rows last are computed one by one;
and a convolution is a product of patches, which are put together pixel by pixel first. The gradient of max pooling goes
through its windows element by element, each of which takes about as long as such a pixel: 24 to 40 ns where the pixel
took 25 (8 devices on 2 cores).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.cluster import DeviceSpec, Mesh
from passes.intra_op.roofline import batch_size, extents, pieces
from passes.ir import TensorType
from passes.rules import Assignment, ShardingRule


def rearranging_seconds(rule: ShardingRule, reads: Sequence[TensorType], assignment: Assignment, mesh: Mesh) -> float:
    """The seconds that one device spends on reordering its pieces of what an operator reads; 0 where it is free."""
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
    if rule.selects:
        spent += rule.flops / math.prod(parts.values()) * device.pixel_seconds
    return spent


def is_ordered(rule: ShardingRule, device: DeviceSpec) -> bool:
    """Whether reordering what an operator reads takes time on a device."""
    if device.strided_bytes_per_second and rearranged(rule):
        return True
    if device.pixel_seconds and (rule.window > 1 or rule.selects):
        return True
    return device.product_seconds > 0 and is_one_by_one(rule)


def is_one_by_one(rule: ShardingRule) -> bool:
    """Whether an operator is a batched product whose left operand has its rows last, as a right operand's gradient has.

    XLA:CPU (jaxlib 0.10.2) calls a library for each of these products, and one kernel for all of them where the summed
    dimension is last: by `autopar measure` 512 products of 8 x 8 x 8 take 1.5 ms so, and 0.13 ms otherwise.
    """
    if not rule.is_product or rule.window > 1:
        return False
    lhs, rhs, out = ([f for f in dims if f >= 0] for dims in (rule.operands[0], rule.operands[1], rule.results[0]))
    is_batch = any(factor in rhs and factor in out for factor in lhs)
    return is_batch and lhs[-1] in out and lhs[-1] not in rhs


def rearranged(rule: ShardingRule) -> tuple[int, ...]:
    """The operands that an operator reads in another order than that of their elements in memory.

    These are a transpose's operand; operands of batched products with a dimension of one product before a batch
    dimension; and operands of convolutions whose channels do not come last, as in gradients. A left operand whose
    summed dimension comes first is not counted: such a product alone takes 1.1 to 1.3 times as long (`python -m
    benchmarks.operators`), but charged for it, products of weights' gradients were predicted too slow.
    """
    if rule.permutes:
        return (0,)
    if rule.convolves:
        return tuple(operand for operand in (0, 1) if not _has_channels_last(rule, operand))
    if not rule.is_product or rule.window > 1:
        return ()
    return tuple(operand for operand in (0, 1) if not _is_in_order(rule, operand))


def _has_channels_last(rule: ShardingRule, operand: int) -> bool:
    """Whether the last dimension of a convolution's images (operand 0) is their channels, or that of its kernel
    (operand 1) the channels of the result.
    """
    last = rule.operands[operand][-1]
    return last >= 0 and last in (rule.operands[1], rule.results[0])[operand]


def _is_in_order(rule: ShardingRule, operand: int) -> bool:
    other, result = rule.operands[1 - operand], rule.results[0]
    numbers = [factor in other and factor in result for factor in rule.operands[operand] if factor >= 0]
    return numbers == sorted(numbers, reverse=True)
