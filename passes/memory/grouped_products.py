"""The operations of a product of rows in groups: on all but TPUs, rows masked for each group, and one product of all.

Reference: `_ragged_dot_general_impl` of jax/_src/lax/lax.py (jax 0.10); XLA:GPU expands its own instruction likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from passes.ir import Node, TensorType
from passes.memory.operations import Operations, Shape
from passes.memory.products import contraction


def grouped(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations that hold the result of a `ragged_dot_general`."""
    numbers = cast("Mapping[str, object]", node.params["ragged_dot_dimension_numbers"])
    contract, batch = cast("tuple[tuple[Shape, Shape], tuple[Shape, Shape]]", numbers["dot_dimension_numbers"])
    (ragged,) = cast("Shape", numbers["lhs_ragged_dimensions"])
    of_groups = cast("Shape", numbers["rhs_group_dimensions"])
    lhs, rhs, sizes = operands
    if ragged in batch[0]:
        return contraction(operations, _product(node, contract, batch), (lhs, rhs), results)
    if operations.compiler == "tpu":
        (type,) = results
        return [operations.add("opaque", operands, type.shape, type.dtype, (node.primitive, operations.at))]
    lhs = _masked(operations, lhs, ragged, sizes)
    if of_groups:
        sums = ((*_later(contract[0]), 0), (*contract[1], *of_groups))
        if operations.compiler == "gpu":  # DotDimensionSorter: no copy of matrices that lie one behind the other
            sums = ((0, *_later(contract[0])), (*of_groups, *contract[1]))
        numbers_of_all = sums, (_later(batch[0]), batch[1])
    else:
        rhs = _masked(operations, rhs, contract[1][contract[0].index(ragged)], sizes)
        numbers_of_all = (_later(contract[0]), _later(contract[1])), ((0, *_later(batch[0])), (0, *_later(batch[1])))
    return contraction(operations, _product(node, *numbers_of_all), (lhs, rhs), results)


def _later(dims: Shape) -> Shape:
    """Dimensions behind that of the groups, which comes first."""
    return tuple(d + 1 for d in dims)


def _masked(operations: Operations, rows: int, along: int, sizes: int) -> int:
    """The operation of rows `along` a dimension, once for each group, those of others zero.

    Sizes that differ along other dimensions make a mask that does, too, in the same kernel.
    """
    described, count = operations[rows], operations[sizes].shape[-1]
    type = TensorType(shape=(count, *described.shape), dtype=described.dtype)
    ends = operations.add("opaque", (sizes,), operations[sizes].shape, operations[sizes].dtype, ("ends", operations.at))
    if len(operations[sizes].shape) == 1:
        is_of = TensorType(shape=(count, described.shape[along]), dtype="bool")
        mask = operations.elementwise("compare", (operations.broadcast(ends, is_of.shape, (0,)),), is_of)
        wide = operations.broadcast(mask, type.shape, (0, along + 1))
    else:
        wide = operations.add("elementwise", (ends,), type.shape, "bool", "compare")
    whole = operations.broadcast(rows, type.shape)
    zero = operations.broadcast(operations.literal(0.0, described.dtype), type.shape, ())
    return operations.elementwise("select", (wide, whole, zero), type)


def _product(node: Node, contract: tuple[Shape, Shape], batch: tuple[Shape, Shape]) -> Node:
    """The node as a plain product."""
    return replace(node, params={"dimension_numbers": (contract, batch)})
