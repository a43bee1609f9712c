"""Gathers and scatters of single elements in windows of one element, written without those windows.

An index under `jax.vmap`, as of the label of each example in its logits, takes a window of one element along the
dimension that it selects from; an index of whole arrays takes the element itself. Both take the same elements. Without
the window it is seen that a device with a part of the dimension takes what it has, and adds zeros for the rest.

Reference: JAX's `GatherDimensionNumbers` and `ScatterDimensionNumbers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.frontend.by_row import GATHER, SCATTERS
from autopar.frontend.primitives import traced_for


def without_windows(equation: Any) -> Any:
    """The jaxpr of a gather or scatter without windows of one element; None of any other equation."""
    if equation.primitive.name == GATHER:
        return _gathered(equation)
    return _scattered(equation) if equation.primitive.name in SCATTERS else None


def _gathered(equation: Any) -> Any:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    operand, shape = equation.invars[0].aval, equation.outvars[0].aval.shape
    window = _others(operand.shape, (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims))
    places = dict(zip(window, numbers.offset_dims, strict=True))
    single = [d for d in window if d in numbers.start_index_map and sizes[d] == 1 < operand.shape[d]]
    if not single:
        return None
    gone = [places[d] for d in single]
    changed = numbers._replace(
        offset_dims=_moved_up(numbers.offset_dims, gone),
        collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, *single))),
    )
    params = equation.params | {"dimension_numbers": changed}
    return traced_for(lambda x, at: [equation.primitive.bind(x, at, **params).reshape(shape)], equation)


def _scattered(equation: Any) -> Any:
    numbers = equation.params["dimension_numbers"]
    operand, _, updates = (var.aval for var in equation.invars)
    window = _others(operand.shape, (*numbers.inserted_window_dims, *numbers.operand_batching_dims))
    places = dict(zip(window, numbers.update_window_dims, strict=True))
    picked = [d for d in window if d in numbers.scatter_dims_to_operand_dims]
    single = [d for d in picked if updates.shape[places[d]] == 1 < operand.shape[d]]
    if not single:
        return None
    gone = [places[d] for d in single]
    changed = numbers._replace(
        update_window_dims=_moved_up(numbers.update_window_dims, gone),
        inserted_window_dims=tuple(sorted((*numbers.inserted_window_dims, *single))),
    )
    params = equation.params | {"dimension_numbers": changed}

    def rewritten(x: jax.Array, at: jax.Array, update: jax.Array) -> list[jax.Array]:
        return [equation.primitive.bind(x, at, update.squeeze(gone), **params)]

    return traced_for(rewritten, equation)


def _others(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [d for d in range(len(shape)) if d not in dims]


def _moved_up(dims: Sequence[int], gone: Sequence[int]) -> tuple[int, ...]:
    """The dimensions that stay, as they are counted without those that are gone."""
    return tuple(d - sum(other < d for other in gone) for d in dims if d not in gone)
