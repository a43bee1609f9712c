"""The columns of matrices that a decomposition or a triangular solve takes one after the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of each matrix, `count` of them, that a GPU's library takes one after the other.

    Each takes `seconds`, however little is computed: kernels that wait for each other. For each matrix `nbytes` are
    read again beyond its operands, by products of what is left of it with one vector a column.
    """

    count: int
    seconds: float
    nbytes: float = 0.0
