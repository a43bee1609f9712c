"""The operations of a node on a device whose compiler computes some dtypes in wider ones only.

Every operation that computes or copies reads its operands widened and rounds what it makes back again; what is only
another view of an array stays as narrow as it is. Where the program itself widens what was just rounded, neither
happens: it reads what was there before. CPUs compute products of float16 in float32, and all else as it is.

Reference: XLA's FloatNormalization under FloatSupport, as the CPU compiler uses it for bfloat16, and its
ChangeOpDataType for products of float16, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from passes.ir import Node, TensorType
from passes.memory.lowering_rules import CONVERSION, NARROW, PRODUCT, PRODUCTS, to_xla
from passes.memory.operations import Operations, widen

HALF, WIDE = "float16", "float32"
"""The dtype of products that a CPU does not have, and the one in which it computes them."""


def to_xla_widened(
    operations: Operations,
    node: Node,
    operands: Sequence[int],
    results: Sequence[TensorType],
) -> list[int]:
    """The operations that hold a node's results."""
    widened = operations.widened
    if node.primitive == CONVERSION and widened.get(operations[operands[0]].dtype) == results[0].dtype:
        return [operations.before_rounding.get(operands[0]) or operations.converted(operands[0], results[0].dtype)]
    if node.primitive in PRODUCTS and operations.compiler == "cpu" and operations[operands[0]].dtype == HALF:
        wide = [replace(type, dtype=WIDE) for type in results]
        made = to_xla(operations, node, [operations.converted(o, WIDE) for o in operands], wide)
        return [operations.converted(o, type.dtype) for o, type in zip(made, results, strict=True)]
    if node.primitive in NARROW:
        return to_xla(operations, node, operands, results)
    # Sides of a product are brought into its order first, and read in the wide dtype then.
    read = operands if node.primitive == PRODUCT else [widen(operations, operand) for operand in operands]
    wide = [TensorType(shape=t.shape, dtype=widened.get(t.dtype, t.dtype)) for t in results]
    operations.rounded_to = next((t.dtype for t in results if t.dtype in widened), "")
    made = to_xla(operations, node, read, wide)
    operations.rounded_to = ""
    return [round_to(operations, o, type.dtype) for o, type in zip(made, results, strict=True)]


def round_to(operations: Operations, operation: int, dtype: str) -> int:
    """The result of an operation computed in a wider dtype, rounded to the one of the program."""
    if operations[operation].dtype == dtype:
        return operation
    rounded = operations.converted(operation, dtype)
    operations.before_rounding[rounded] = operation
    operations.rounded.add(operation)
    return rounded
