"""Gathers and scatters of one element a row, `x[jnp.arange(n), i]`, as those that take rows one by one.

Their indices name the row in a column that counts rows. Without that column, and with rows side by side, the same
elements are taken, and it is seen that no row needs another: a batch can be cut, and taken in parts.

Reference: JAX's `GatherDimensionNumbers`, whose `operand_batching_dims` are dimensions side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from autopar.frontend.primitives import traced_for
from passes.ir import Node, TensorType

GATHER = "gather"
SCATTERS = frozenset({"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})

_VIEWS = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
"""Primitives whose result has the elements of their operand."""

_FIELDS = {
    GATHER: ("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims"),
    **dict.fromkeys(
        SCATTERS, ("inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims")
    ),
}
"""By primitive, the names of the dimensions that are left out, of those that columns of indices are for, and of those
of indices that lie side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The values of a program so far: their types, the nodes that make them, arrays that are known, and numbers."""

    types: Sequence[TensorType]
    makers: Mapping[int, Node]
    constants: Mapping[int, Any]
    literals: Mapping[int, object]

    def counted(self, value: int) -> int | None:
        """The dimension along which a value counts from 0, as an iota does; None for any other value."""
        node, type = self.makers.get(value), self.types[value]
        if node is None:
            return _counted(self.constants[value]) if value in self.constants else None
        if node.primitive == "iota":
            dim = cast("int", node.params["dimension"])
            return dim if _holds(type.dtype, type.shape[dim]) else None
        if node.primitive == "select_n":
            return self.counted(node.inputs[1]) if self._is_from_the_end(node) else None
        if node.primitive not in _VIEWS or (dim := self.counted(node.inputs[0])) is None:
            return None
        source = self.types[node.inputs[0]]
        if node.primitive == "convert_element_type":
            return dim if _holds(type.dtype, source.shape[dim]) else None
        if node.primitive == "broadcast_in_dim":
            place = cast("Sequence[int]", node.params["broadcast_dimensions"])[dim]
            return place if type.shape[place] == source.shape[dim] else None
        before, after = ([d for d, size in enumerate(t.shape) if size > 1] for t in (source, type))
        return after[0] if before == [dim] and len(after) == 1 else None

    def _is_from_the_end(self, node: Node) -> bool:
        """Whether a selection is of an index or, where that is below 0, of the one that it stands for."""
        compared = self.makers.get(node.inputs[0])
        if node.inputs[0] in self.constants:
            return not np.any(np.asarray(self.constants[node.inputs[0]]))
        if compared is None or compared.primitive != "lt" or compared.inputs[0] != node.inputs[1]:
            return False
        return self.literals.get(compared.inputs[1]) == 0


def _counted(array: Any) -> int | None:
    """The dimension along which a known array counts from 0."""
    if getattr(array, "dtype", None) is None or np.dtype(array.dtype).kind not in "iu":
        return None
    known = np.asarray(array)
    for dim, size in enumerate(known.shape):
        along = np.arange(size).reshape(size, *[1] * (known.ndim - dim - 1))
        if size > 1 and np.array_equal(known, np.broadcast_to(along, known.shape)):
            return dim
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The columns of indices that are left, and the parameters of the gather or scatter that takes them."""

    columns: tuple[int, ...]
    params: Mapping[str, Any]


def _holds(dtype: str, count: int) -> bool:
    """Whether a dtype is one of integers that counts so many from 0."""
    return dtype.startswith(("int", "uint")) and count - 1 <= np.iinfo(dtype).max


def by_row(primitive: str, params: Mapping[str, Any], inputs: Sequence[int], values: Values) -> Rows | None:
    """A gather or scatter with the columns of its indices that count rows left out; None where there are none.

    At least one column has to be left.
    """
    joined = values.makers.get(inputs[1])
    indices = values.types[inputs[1]]
    if joined is None or joined.primitive != "concatenate" or joined.params["dimension"] != indices.rank - 1:
        return None
    if any(values.types[column].shape[-1] != 1 for column in joined.inputs):
        return None
    numbers, (dropped, mapped, beside) = params["dimension_numbers"], _FIELDS[primitive]
    removed, targets, in_indices = (getattr(numbers, name) for name in (dropped, mapped, beside))
    pairs = dict(zip(numbers.operand_batching_dims, in_indices, strict=True))
    kept: list[tuple[int, int]] = []
    for column, target in zip(joined.inputs, targets, strict=True):
        dim, rows = values.counted(column), values.types[inputs[0]].shape[target]
        if (
            dim is None
            or dim in (*pairs.values(), indices.rank - 1)
            or target not in removed
            or indices.shape[dim] != rows
        ):
            kept.append((column, target))
        else:
            pairs[target] = dim
    if not kept or len(kept) == len(joined.inputs):
        return None
    changed = {
        dropped: tuple(d for d in removed if d not in pairs),
        mapped: tuple(target for _, target in kept),
        "operand_batching_dims": tuple(sorted(pairs)),
        beside: tuple(pairs[d] for d in sorted(pairs)),
    }
    taken = {**params, "dimension_numbers": numbers._replace(**changed), "indices_are_sorted": False}
    return Rows(columns=tuple(column for column, _ in kept), params=taken)


def taken_whole(equation: Any) -> Any:
    """The jaxpr of a gather or scatter at index 0 of all that there is, as `jnp.take(x, 0, -1)` takes it of one column:
    the operand in another shape, or what is added to it; None for all else.
    """
    operand, _, *updates = (var.aval for var in equation.invars)
    name, params, result = equation.primitive.name, equation.params, equation.outvars[0].aval
    numbers = params["dimension_numbers"]
    if numbers.operand_batching_dims:
        return None
    if name == "scatter-add" and any(operand.shape[d] != 1 for d in numbers.inserted_window_dims):
        return None  # as many rows as there are may all be added to the first
    if name == GATHER and tuple(params["slice_sizes"]) == operand.shape and result.size == operand.size:
        return traced_for(lambda x, _: [x.reshape(result.shape)], equation)
    if name == "scatter-add" and updates[0].size == operand.size:
        window = tuple(updates[0].shape[d] for d in numbers.update_window_dims)
        if window == tuple(n for d, n in enumerate(operand.shape) if d not in numbers.inserted_window_dims):
            return traced_for(lambda x, _, y: [x + y.reshape(x.shape)], equation)
    return None
