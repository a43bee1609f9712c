"""The operands of products as TPUs multiply them: float32 is rounded to bfloat16 where the program asks for no more.

The compiler writes that conversion out. So what products alone read is in memory in bfloat16, as whatever makes it goes
on with the conversion; of what products alone read of an all-gather, each device rounds its part and sends that; and
what products alone read on both sides of an optimization barrier passes it rounded.

Reference: `jax.lax.Precision.DEFAULT`; the HLO that libtpu 0.0.42 makes of vision transformers in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from passes.memory.all_reduces import in_order
from passes.memory.operations import UNIFORM, Operation, Operations, Shape

WIDE, NARROW = "float32", "bfloat16"

UNSAID = "DEFAULT"
"""The precision of an operand of which a program that gives one for the other says no more."""

ROUNDED = (f"convert {WIDE}", "as a product reads it")
"""The tag of a conversion that no program asks for, and the compiler writes out once kernels are fused."""

BARRIER = "barrier"
"""The name of optimization barriers, and of what is behind them."""

VIEWS = frozenset({"transpose", "bitcast"})
"""Kinds through which an array is read as it is."""


def rounded(operations: Operations, params: Mapping[str, object], operands: Sequence[int]) -> list[int]:
    """The operands of a product or a convolution as its kernel multiplies them."""
    precision = params.get("precision")
    asks = precision is not None and (isinstance(precision, str) or {*cast("Sequence[str]", precision)} != {UNSAID})
    if operations.compiler != "tpu" or asks:
        return list(operands)
    return [_rounded(operations, operand) for operand in operands]


def _rounded(operations: Operations, operand: int) -> int:
    """An operand in bfloat16, rounded before it is brought into another order or shape."""
    source = operations[operand]
    if source.dtype != WIDE:
        return operand
    if source.kind == "transpose":
        return operations.transpose(_rounded(operations, source.operands[0]), cast("Shape", source.tag))
    if source.kind == "bitcast" and source.tag is None:
        return operations.reshape(_rounded(operations, source.operands[0]), source.shape)
    if source.is_conversion and operations[source.operands[0]].dtype == NARROW:
        return source.operands[0]
    if source.kind in UNIFORM:
        return operations.converted(operand, NARROW)
    return operations.add("expensive", (operand,), source.shape, NARROW, ROUNDED)


def sent_rounded(
    operations: Sequence[Operation], outputs: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with what is gathered for products alone rounded before it is sent, in a valid order, and the new
    position of each old one.
    """
    readers = _readers(operations)
    changed, returned = list(operations), frozenset(outputs)
    for index, operation in enumerate(operations):
        if operation.kind != "collective" or operation.name != "all_gather" or operation.dtype != WIDE:
            continue
        views = _views(operations, readers, index)
        ends = [reader for view in views for reader in readers[view] if reader not in views]
        if not ends or not returned.isdisjoint(views) or not all(_is_rounding(operations[end]) for end in ends):
            continue
        (sent,) = operation.operands
        changed.append(operations[ends[0]]._replace(operands=(sent,), shape=operations[sent].shape))
        changed[index] = operation._replace(operands=(len(changed) - 1,))
        for view in views:
            changed[view] = changed[view]._replace(dtype=NARROW)
        for end in ends:
            changed[end] = changed[end]._replace(kind="bitcast", tag=None)
    return in_order(operations, changed)


def passed_rounded(
    operations: Sequence[Operation], outputs: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with what products alone read before and behind a barrier rounded before it, in a valid order,
    and the new position of each old one.
    """
    readers, returned = _readers(operations), frozenset(outputs)
    changed = list(operations)
    for index, operation in enumerate(operations):
        if operation.kind != "part" or operation.name != BARRIER or operation.dtype != WIDE:
            continue
        source = operation.operands[0]
        before, behind = _views(operations, readers, source), _views(operations, readers, index)
        ends = [r for view in behind for r in readers[view] if r not in behind]
        others = [r for view in before for r in readers[view] if r not in before and operations[r].name != BARRIER]
        if not ends or not returned.isdisjoint((*before, *behind)) or operations[source].kind == "input":
            continue
        if not all(_is_rounding(operations[r]) for r in (*ends, *others)):
            continue
        changed.append(operations[ends[0]]._replace(operands=(source,), shape=operations[source].shape))
        rounded = len(changed) - 1
        for r in readers[source]:
            if r in others:
                changed[r] = changed[r]._replace(kind="bitcast", operands=(rounded,), tag=None)
            elif operations[r].name == BARRIER:
                changed[r] = changed[r].reading(tuple(rounded if o == source else o for o in changed[r].operands))
        for view in behind:
            changed[view] = changed[view]._replace(dtype=NARROW)
        for end in ends:
            changed[end] = changed[end]._replace(kind="bitcast", tag=None)
    return in_order(operations, changed)


def _readers(operations: Sequence[Operation]) -> list[list[int]]:
    """The operations that read each operation, once for each operand."""
    readers: list[list[int]] = [[] for _ in operations]
    for index, operation in enumerate(operations):
        for o in operation.operands:
            readers[o].append(index)
    return readers


def _views(operations: Sequence[Operation], readers: Sequence[Sequence[int]], index: int) -> list[int]:
    """An operation and all that are the same elements in another order or shape."""
    views = [index]
    for view in views:
        views.extend(reader for reader in readers[view] if operations[reader].kind in VIEWS)
    return views


def _is_rounding(operation: Operation) -> bool:
    return operation.is_conversion and operation.dtype == NARROW
