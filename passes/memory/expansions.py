"""The functions of elements that XLA computes by simpler ones: products, quotients, integer powers, logistic functions,
and the inverse error function.

Reference: XLA's AlgebraicSimplifier and LogisticExpander, and the CHLO functions that JAX writes, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from passes.ir import Node, TensorType
from passes.memory.operations import Operations, is_number


def divided(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a quotient: a product by something known, and but on GPUs the first by what is broadcast."""
    (type,), (above, below) = results, operands
    if "float" not in type.dtype:
        return [operations.elementwise("divide", operands, type, expensive=operations.number(below) is None)]
    if (number := operations.number(below)) is not None:
        if is_number(number, 1.0):
            return [operations.broadcast(above, type.shape)]
        return [operations.elementwise("multiply", (above, operations.literal(("1/", number), type.dtype)), type)]
    spread = operations[at := operations.broadcast(below, type.shape)]
    is_product = operations.compiler != "gpu" and spread.kind == "broadcast" and operations.number(above) is None
    if not is_product or operations.divided.setdefault(at, above) != above:
        return [operations.elementwise("divide", operands, type, expensive=True)]
    narrow = TensorType(shape=operations[spread.operands[0]].shape, dtype=type.dtype)
    ones = operations.literal(1.0, type.dtype)
    inverse = operations.elementwise("divide", (ones, spread.operands[0]), narrow, expensive=True)
    wide = operations.broadcast(inverse, type.shape, cast("tuple[int, ...]", spread.tag))
    return [operations.elementwise("multiply", (above, wide), type)]


def multiplied(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a product: by what is true or false it is a choice, and a number that one factor was multiplied
    by goes over to another one that is broadcast, or to another number.
    """
    (type,) = results
    for factor, other in (operands, operands[::-1]):
        described = operations[factor]
        if described.name == "convert bool":
            zero = operations.broadcast(operations.literal(0.0, type.dtype), type.shape, ())
            return [operations.elementwise("select", (described.operands[0], other, zero), type)]
    for factor, other in (operands, operands[::-1]):
        described, spread = operations[factor], operations.broadcast(other, type.shape)
        if described.kind != "elementwise" or described.name != "multiply" or operations[spread].kind != "broadcast":
            continue
        numbers = [each for each in described.operands if operations.number(each) is not None]
        arrays = [each for each in described.operands if operations.number(each) is None]
        if not numbers or not arrays:
            continue
        made = _scaled(operations, spread, operations.number(numbers[0]))
        return [operations.elementwise("multiply", (*arrays, made), type)]
    return [operations.elementwise("multiply", operands, type)]


def _scaled(operations: Operations, spread: int, number: object) -> int:
    """A broadcast array, or another number, multiplied by a number before it is broadcast."""
    described = operations[spread]
    (narrow,) = described.operands
    if (other := operations.number(narrow)) is not None:
        return operations.broadcast(operations.literal(("*", number, other), described.dtype), described.shape)
    type = TensorType(shape=operations[narrow].shape, dtype=described.dtype)
    made = operations.elementwise("multiply", (narrow, operations.literal(number, type.dtype)), type)
    return operations.broadcast(made, described.shape, cast("tuple[int, ...]", described.tag))


def power(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of an integer power: squares of squares, times those that the exponent's bits ask for."""
    (type,), exponent, (operand,) = results, cast("int", node.params["y"]), operands

    def read(operation: int) -> int:
        return operation if operation == operand else operations.step(operation)

    square, raised = operand, -1
    for bit in range(abs(exponent).bit_length()):
        if bit:
            square = operations.elementwise("multiply", (read(square), read(square)), type)
        if abs(exponent) >> bit & 1:
            raised = square if raised < 0 else operations.elementwise("multiply", (read(square), read(raised)), type)
    if exponent < 0:
        ones = operations.literal(1.0, type.dtype)
        raised = operations.elementwise("divide", (ones, read(raised)), type, expensive=True)
    return [raised if exponent else operations.broadcast(operations.literal(1.0, type.dtype), type.shape, ())]


def logistic(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    (type,), ones = results, operations.literal(1.0, results[0].dtype)
    negative = operations.step(operations.elementwise("negate", operands, type))
    exponential = operations.step(operations.elementwise("exponential", (negative,), type, expensive=True))
    below = operations.step(operations.elementwise("add", (ones, exponential), type))
    return [operations.elementwise("divide", (ones, below), type, expensive=True)]


def error_inverse(
    operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]
) -> list[int]:
    """The operations of the inverse error function: a polynomial in a logarithm, or in its root where it is large."""
    (type,), (operand,) = results, operands

    def step(name: str, *read: int, dtype: str = type.dtype, expensive: bool = False) -> int:
        of = TensorType(shape=type.shape, dtype=dtype)
        return operations.step(operations.elementwise(name, read, of, expensive=expensive))

    squared = step("multiply", operand, step("negate", operand))
    logarithm = step("negate", step("log-plus-one", squared, expensive=True))
    is_small = step("compare", logarithm, dtype="bool")
    term = step("select", is_small, step("subtract", logarithm), step("sqrt", logarithm, expensive=True))
    polynomial = step("multiply", step("add", is_small, term), term)
    return [operations.elementwise("multiply", (polynomial, operand), type)]
