"""Gathers and scatters of one element of each row, `x[jnp.arange(n), i]`, rewritten to take rows one by one.

Their indices have a column that counts rows. Without that column, and with rows as a batch dimension, the same elements
are taken, and it is seen that no row needs another: a batch can be sharded, and taken in parts.

JAX moves what counts rows out of a loop over layers, and stacks the joined indices of all layers for the backward loop:
so bodies are given the counts of their inputs, and loops the counts of their results.

Reference: JAX's `GatherDimensionNumbers`, whose `operand_batching_dims` are batch dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from autopar import jax_compat
from autopar.frontend.primitives import traced_for
from passes.ir import Node, TensorType

GATHER = "gather"
SCATTERS = frozenset({"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})

_BARRIER = "optimization_barrier"

_VIEWS = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
"""Primitives whose result has the elements of their operand."""

_FIELDS = {
    GATHER: ("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims"),
    **dict.fromkeys(
        SCATTERS, ("inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims")
    ),
}
"""By primitive, the names of its parameters for dimensions that are left out, for those that columns of indices select
from, and for batch dimensions of operand and indices.
"""


Count = int | tuple[int | None, ...]
"""The dimension along which a value counts from 0; or that of each column, which is an index into its last dimension,
None for a column that does not count."""

_UNSET: Count = ()
"""The count of a value that may be anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The values of a program so far: their types, the nodes that make them, the arrays and numbers that are known, and
    how values count.

    `given` are the counts of values that no node here makes: inputs of a loop's body, and results of a loop.
    """

    types: Sequence[TensorType]
    makers: Mapping[int, Node]
    constants: Mapping[int, Any]
    literals: Mapping[int, object]
    given: dict[int, Count] = field(default_factory=dict)

    def give(self, values: Sequence[int], counts: Sequence[Count | None]) -> None:
        """Notes how values count that no node here makes."""
        self.given.update((v, count) for v, count in zip(values, counts, strict=True) if count is not None)

    def count(self, value: int) -> Count | None:
        """Everything that is known of how a value counts; None if it does not."""
        if (dim := self.counted(value)) is not None:
            return dim
        if self._is_unset(value):
            return _UNSET
        columns = self.columns(value)
        return None if all(column is None for column in columns) else columns

    def columns(self, value: int) -> tuple[int | None, ...]:
        """The dimension along which each column of a value counts, None for columns that do not; empty if the value is
        not known by columns.
        """
        node, count = self.makers.get(value), self.given.get(value)
        if count is not None:
            return count if isinstance(count, tuple) else ()
        if node is None:
            return ()
        if node.primitive == _BARRIER:
            return self.columns(node.inputs[node.outputs.index(value)])
        return tuple(map(self.counted, columns_of(node, self.types)))

    def counted(self, value: int) -> int | None:
        """The dimension along which a value counts from 0, as an iota does; None for any other value."""
        node, type, count = self.makers.get(value), self.types[value], self.given.get(value)
        if count is not None:
            return count if isinstance(count, int) else None
        if node is None:
            return _counted(self.constants[value]) if type.is_integer and value in self.constants else None
        if node.primitive == "iota":
            dim = cast("int", node.params["dimension"])
            return dim if _holds(type.dtype, type.shape[dim]) else None
        if node.primitive == _BARRIER:
            return self.counted(node.inputs[node.outputs.index(value)])
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

    def _is_unset(self, value: int) -> bool:
        """Whether a value may be anything, like what another branch saves for the backward pass."""
        node = self.makers.get(value)
        if node is not None and node.primitive == "broadcast_in_dim":
            node = self.makers.get(node.inputs[0])
        return self.given.get(value) == _UNSET or (node is not None and node.primitive == "empty2")

    def _is_from_the_end(self, node: Node) -> bool:
        """Whether a selection is of an index or, where that is below 0, of the one that it stands for."""
        compared = self.makers.get(node.inputs[0])
        if node.inputs[0] in self.constants:
            return not np.any(np.asarray(self.constants[node.inputs[0]]))
        if compared is None or compared.primitive != "lt" or compared.inputs[0] != node.inputs[1]:
            return False
        return self.literals.get(compared.inputs[1]) == 0


def _counted(array: Any) -> int | None:
    """The dimension along which a known array of integers counts from 0; None where not all of it is on this
    process.
    """
    if not isinstance(array, np.ndarray) and not (jax_compat.is_concrete(array) and array.is_fully_addressable):
        return None
    known = np.asarray(array)
    for dim, size in enumerate(known.shape):
        along = np.arange(size).reshape(size, *[1] * (known.ndim - dim - 1))
        if size > 1 and np.array_equal(known, np.broadcast_to(along, known.shape)):
            return dim
    return None


def entering(equation: Any, counts: Sequence[Count | None]) -> list[list[Count | None]]:
    """The counts of the inputs of each body of a loop or branch, by those of its operands; carries have none."""
    params = equation.params
    match equation.primitive.name:
        case "scan":
            numbers = jax_compat.scan_counts(params)
            first, begin = numbers["num_consts"], numbers["num_consts"] + numbers["num_carry"]
            return [[*counts[:first], *[None] * (begin - first), *(_stacked(count, -1) for count in counts[begin:])]]
        case "while":
            first, begin = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            carries = [None] * (len(counts) - begin)
            return [[*counts[:first], *carries], [*counts[first:begin], *carries]]
        case "cond":
            return [list(counts[1:]) for _ in params["branches"]]
        case _:
            return []


def leaving(equation: Any, bodies: Sequence[Sequence[Count | None]]) -> list[Count | None]:
    """The counts of the results of a loop or branch, by those of its bodies: of what a scan stacks, and of results in
    which all branches that set them agree.
    """
    match equation.primitive.name:
        case "scan":
            carries = jax_compat.scan_counts(equation.params)["num_carry"]
            return [*[None] * carries, *(_stacked(count, 1) for count in bodies[0][carries:])]
        case "cond":
            counts = ({count for count in branches if count != _UNSET} for branches in zip(*bodies, strict=True))
            return [each.pop() if len(each) == 1 else None if each else _UNSET for each in counts]
        case _:
            return [None] * len(equation.outvars)


def _stacked(count: Count | None, by: int) -> Count | None:
    """The count of a stack of values that count so, `by` 1, or of each value in such a stack, `by` -1."""
    if count is None or isinstance(count, int):
        return None if count is None or count + by < 0 else count + by
    columns = tuple(None if column is None or column + by < 0 else column + by for column in count)
    return None if all(column is None for column in columns) else columns


def columns_of(node: Node | None, types: Sequence[TensorType]) -> tuple[int, ...]:
    """The values that a node joins as the columns of its result; empty for any other node."""
    if node is None or node.primitive != "concatenate" or node.params["dimension"] != types[node.outputs[0]].rank - 1:
        return ()
    return node.inputs if all(types[column].shape[-1] == 1 for column in node.inputs) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The indices without the columns that count rows, and the parameters of the gather or scatter that takes them."""

    columns: tuple[int, ...]
    params: Mapping[str, Any]


def _holds(dtype: str, count: int) -> bool:
    """Whether a dtype has integers large enough to count to `size` from 0."""
    return dtype.startswith(("int", "uint")) and count - 1 <= np.iinfo(dtype).max


def by_row(primitive: str, params: Mapping[str, Any], inputs: Sequence[int], values: Values) -> Rows | None:
    """A gather or scatter without the columns of its indices that count rows; None where there are none.

    At least one column has to be left.
    """
    indices, columns = values.types[inputs[1]], values.columns(inputs[1])
    if not columns:
        return None
    numbers, (dropped, mapped, beside) = params["dimension_numbers"], _FIELDS[primitive]
    removed, targets, in_indices = (getattr(numbers, name) for name in (dropped, mapped, beside))
    pairs = dict(zip(numbers.operand_batching_dims, in_indices, strict=True))
    kept: list[tuple[int, int]] = []
    for column, (dim, target) in enumerate(zip(columns, targets, strict=True)):
        rows = values.types[inputs[0]].shape[target]
        if (
            dim is None
            or dim in (*pairs.values(), indices.rank - 1)
            or target not in removed
            or indices.shape[dim] != rows
        ):
            kept.append((column, target))
        else:
            pairs[target] = dim
    if not kept or len(kept) == len(columns):
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
    """The jaxpr of a gather or scatter at index 0 of the only element, as of one column in `jnp.take(x, 0, -1)`: the
    operand in another shape, or the sum with it; None for any other.
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
