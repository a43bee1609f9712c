"""The operations of reductions over windows and of their transposes: padding folded in, and the choice of each window.

Reference: XLA's AlgebraicSimplifier::HandleReduceWindow and SelectAndScatterExpander, as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from passes.ir import Node, TensorType
from passes.memory.operations import Operation, Operations, Shape, is_number

REDUCED = "reduce-window-"
"""The beginning of the names of reductions over windows."""

HEAD = "from the first element"
"""The tag of slices that cut padding off, where none is in front."""

CHOICE = "window"
"""The name of what finds the place of each window's choice."""


def windowed(operations: Operations, name: str, initial: float, operand: int, type: TensorType) -> int:
    """The operation of a reduction over windows, which pads what it reads itself, with the number it begins with."""
    source = operations[operand]
    if source.name in ("pad", "loop pad") and is_number(operations.number(source.operands[1]), initial):
        operand = source.operands[0]
    return operations.add("opaque", (operand,), type.shape, type.dtype, (name, operations.at))


def selected(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a scatter to the choice of each window: one kernel finds value and place, the latter is read.

    What is scattered is copied into rows of one element. Padding is added before, and cut off after.
    """
    source, operand = operands
    (type,), windows = results, operations[source]
    padding = cast("tuple[tuple[int, int], ...]", node.params["padding"])
    padded = tuple(size + before + after for size, (before, after) in zip(type.shape, padding, strict=True))
    if padded != type.shape:
        least = operations.literal(-math.inf, type.dtype)
        operand = operations.add("rearrange", (operand, least), padded, type.dtype, ("pad", operations.at))
        operand = operations.step(operand)
    places = _places(operations, operand, windows.shape)
    zeros = operations.broadcast(operations.literal(0.0, type.dtype), padded, ())
    rows = operations.reshape(source, (windows.size,))
    rows = operations.add("rearrange", (rows,), (windows.size,), windows.dtype, ("rows", operations.at))
    scattered = operations.add("update", (zeros, places, rows), padded, type.dtype, ("scatter", operations.at))
    if padded != type.shape:
        sliced = (operations.step(scattered),)
        tag = ("slice", operations.at) if any(before for before, _ in padding) else ("slice", operations.at, HEAD)
        scattered = operations.add("rearrange", sliced, type.shape, type.dtype, tag)
    return [scattered]


def _places(operations: Operations, operand: int, windows: Shape) -> int:
    """The places of the choices of all windows, found among counters, [windows, dimensions]."""
    chosen = operations[operand]
    counters = [operations.add("iota", (), chosen.shape, "int32", d) for d in range(len(chosen.shape))]
    addresses = (len(counters) + 1,)  # of what one kernel writes, which is in memory as well
    choice = operations.add("opaque", (operand, *counters), addresses, "uint64", (CHOICE, operations.at))
    dtypes = (chosen.dtype, *("int32" for _ in counters))
    values = [operations.add("result", (choice,), windows, dtype, i) for i, dtype in enumerate(dtypes)]
    shape = (math.prod(windows), len(counters))
    return operations.add("rearrange", values[1:], shape, "int32", ("places", operations.at))


def is_choice(operations: Sequence[Operation], index: int) -> bool:
    """Whether an operation is one of the results of what finds each window's choice."""
    described = operations[index]
    return described.kind == "result" and operations[described.operands[0]].name == CHOICE


def sources(operations: Sequence[Operation]) -> dict[int, int]:
    """The operations that are scattered to the choices of windows, by the operation that finds those."""
    scattered: dict[int, int] = {}
    for operation in operations:
        if operation.kind == "update" and operation.name == "scatter" and len(operation.operands) == 3:
            places, rows = operation.operands[1:]
            for index in operations[places].operands:
                if is_choice(operations, index):
                    scattered[operations[index].operands[0]] = rows
    return scattered
