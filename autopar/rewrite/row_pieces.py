"""Rows of a batch in microbatches, as whole arrays: in order, or with the rows of each device together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Pieces(NamedTuple):
    """An array of which each microbatch has a piece: their `stack`, [count, ...], is cut along the dimension `dim` of
    the whole array.
    """

    stack: jax.Array
    dim: int

    def in_order(self) -> jax.Array:
        """The whole array: all rows of the first microbatch, then those of the second."""
        return _merged(jnp.moveaxis(self.stack, 0, self.dim), self.dim)

    def side_by_side(self) -> jax.Array:
        """The whole array in another order: the first row of each microbatch, then the second of each.

        Devices that have a part of each microbatch's rows have a part of these, so none is sent.
        """
        return _merged(jnp.moveaxis(self.stack, 0, self.dim + 1), self.dim)


def pieces_of(array: jax.Array, dim: int, count: int) -> Pieces:
    """The pieces of an array that has the rows of `count` microbatches side by side."""
    shape = array.shape
    apart = lax.reshape(array, (*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :]))
    return Pieces(stack=jnp.moveaxis(apart, dim + 1, 0), dim=dim)


def _merged(array: jax.Array, dim: int) -> jax.Array:
    """The array with a dimension and the next one as one."""
    shape = array.shape
    return lax.reshape(array, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))


def _summed(pieces: jax.Array) -> jax.Array:
    return pieces.any(0) if pieces.dtype == np.bool_ else pieces.sum(0, dtype=pieces.dtype)


REDUCED: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "add": _summed,
        "max": lambda pieces: pieces.max(0),
        "min": lambda pieces: pieces.min(0),
        "or": lambda pieces: pieces.any(0),
        "and": lambda pieces: pieces.all(0),
    }
)
"""Reductions over the results of microbatches, by the reduction of a rule's factor."""
