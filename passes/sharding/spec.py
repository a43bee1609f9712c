"""Sharding specs: the mesh axes that cut each dimension of a value, and those over which it is a partial result."""

from __future__ import annotations

import math
from dataclasses import dataclass

from passes.cluster import Axes
from passes.errors import InternalError
from passes.ir import TensorType

ANY = "any"
"""The reduction of whether any row of a loop goes on: an `or`, which devices need not make that share nothing else in
the loop."""

REDUCTIONS = ("add", "max", "min", "or", "and", ANY)
"""The reductions that partial values may still need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSpec:
    """The placement of a value: `dims[d]` are the mesh axes that cut dimension d, major first; `partial` are axes still
    to be reduced.

    All partial axes of a value share one `reduction`, one of `REDUCTIONS`. Axes named nowhere hold copies. Only the
    last axis of a dimension can be added for free or gathered alone.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    reduction: str = "add"

    @property
    def axes(self) -> frozenset[str]:
        """Every axis the value is cut or partial over."""
        return frozenset(self.partial).union(*self.dims)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    def local_shape(self, shape: tuple[int, ...], mesh: Axes) -> tuple[int, ...]:
        """The shape of one device's piece. Raises InternalError where an axis does not divide its dimension."""
        local: list[int] = []
        for size, axes in zip(shape, self.dims, strict=True):
            parts = math.prod(mesh.axis_size(axis) for axis in axes)
            if size % parts:
                raise InternalError(f"{parts} devices do not divide a dimension of {size} under {self}")
            local.append(size // parts)
        return tuple(local)

    def local_nbytes(self, type: TensorType, mesh: Axes) -> int:
        return math.prod(self.local_shape(type.shape, mesh)) * type.item_nbytes

    def verify(self, type: TensorType, mesh: Axes) -> None:
        """Raises InternalError unless ranks agree, no axis is used twice and every axis divides."""
        if len(self.dims) != type.rank:
            raise InternalError(f"spec {self} has {len(self.dims)} dimensions, the value {type} has {type.rank}")
        used = [axis for axes in (*self.dims, self.partial) for axis in axes]
        if len(set(used)) != len(used) or not set(used) <= set(mesh.axes):
            raise InternalError(f"spec {self} uses an axis twice or one that mesh {mesh} lacks")
        self.local_shape(type.shape, mesh)

    def __str__(self) -> str:
        dims = ", ".join("-" if not axes else "+".join(axes) for axes in self.dims)
        tail = f" {self.reduction}@{'+'.join(self.partial)}" if self.partial else ""
        return f"[{dims}]{tail}"


def replicated(rank: int) -> ShardingSpec:
    """The spec of a value that every device holds whole."""
    return ShardingSpec(dims=((),) * rank)


def parse_spec(text: str) -> ShardingSpec:
    """The spec that a text such as `[x, -] add@y` stands for, as plans store it."""
    body, _, tail = text.partition("]")
    inner = body.removeprefix("[")
    parts = [part.strip() for part in inner.split(",")] if inner.strip() else []
    dims = tuple(() if part == "-" else tuple(part.split("+")) for part in parts)
    if not tail.strip():
        return ShardingSpec(dims=dims)
    reduction, _, axes = tail.strip().partition("@")
    return ShardingSpec(dims=dims, partial=tuple(axes.split("+")), reduction=reduction)
