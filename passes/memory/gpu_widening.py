"""Arithmetic that XLA's GPU compiler does in float32, for GPUs that add and multiply no bfloat16: those before Hopper.

Each such operation reads its operands widened and its result is rounded; where a result is widened again, its reader
reads what was there before the rounding. What is written to memory for such readers takes twice the bytes. Dimensions
that are summed together are made one first, by another view of what was rounded: such a sum reads that.

Reference: XLA's GpuFloatSupport::IsSupported under FloatNormalization (xla/service/gpu/gpu_float_support.cc), and
SimplifyFPConversions with `xla_allow_excess_precision`, behind ReductionDimensionGrouper, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from passes.memory.operations import ELEMENTWISE, Operation, Shape

NARROW, WIDE = "bfloat16", "float32"
NATIVE = frozenset("abs checked copy exponential log masked maximum minimum negate reduce-precision select xor".split())
"""Operations on elements that Ampere computes in bfloat16, beside comparisons and conversions."""


AGAIN = f"convert {NARROW}"
"""The name of what widens what was rounded."""


def widened(operations: Sequence[Operation]) -> tuple[list[Operation], list[int]]:
    """The operations with arithmetic on bfloat16 in float32, in a valid order, and the new position of each old one."""
    changed: list[Operation] = []
    place: list[int] = []
    wide: dict[int, int] = {}

    def add(operation: Operation) -> int:
        changed.append(operation)
        return len(changed) - 1

    def widen(index: int) -> int:
        """The operation in float32, before it was rounded or converted once for all readers."""
        if changed[index].dtype != NARROW:
            return index
        if index not in wide:
            source = changed[index]
            wide[index] = add(source._replace(kind="elementwise", operands=(index,), dtype=WIDE, tag=AGAIN, value=-1))
        return wide[index]

    for operation in operations:
        operands = tuple([place[o] for o in operation.operands])
        if operation.name == f"convert {NARROW}" and operation.dtype == WIDE:
            place.append(widen(operands[0]))
        elif operation.dtype == NARROW and _is_grouped(operation, operations):
            (read,) = operands
            source = changed[read]
            rounded = add(source._replace(kind="elementwise", operands=(read,), dtype=WIDE, tag=AGAIN, value=-1))
            made = add(operation._replace(operands=(rounded,), dtype=WIDE))
            place.append(add(operation._replace(kind="expensive", operands=(made,), tag=f"convert {WIDE}")))
            wide[place[-1]] = made
        elif operation.dtype == NARROW and _is_wide(operation):
            made = add(operation._replace(operands=tuple([widen(o) for o in operands]), dtype=WIDE))
            rounded = operation._replace(kind="expensive", operands=(made,), tag=f"convert {WIDE}")
            place.append(add(rounded))
            wide[place[-1]] = made
        else:
            place.append(add(operation.reading(operands)))
            if operation.name == f"convert {WIDE}" and operation.dtype == NARROW:
                wide[place[-1]] = operands[0]
    return changed, place


def _is_grouped(operation: Operation, operations: Sequence[Operation]) -> bool:
    """Whether an operation sums bfloat16 along several dimensions."""
    if operation.kind != "reduce" or not _is_wide(operation):
        return False
    shape = operations[operation.operands[0]].shape
    return sum(shape[d] > 1 for d in cast("tuple[str, Shape]", operation.tag)[1]) > 1


def _is_wide(operation: Operation) -> bool:
    """Whether an operation on bfloat16 is done in float32."""
    if operation.kind == "reduce":
        return operation.name == "reduce-sum"
    return operation.kind in ELEMENTWISE and operation.name not in NATIVE and not operation.name.startswith("convert ")
