"""Placements that users write by device numbers, on meshes of their own, before the plan has a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Runs = tuple[tuple[int, int], ...]
"""The devices along one dimension: (pieces, stride) pairs, major first; device k has piece k // stride % pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlacement:
    """The pieces of an array that each of `devices` devices has, numbered in the order of the user's mesh.

    `dims[d]` are the runs of devices that cut dimension d, with no two that could be joined to one; None leaves it
    open.
    """

    devices: int
    dims: tuple[Runs | None, ...]

    @property
    def is_whole(self) -> bool:
        """Whether no dimension is cut, which any mesh allows."""
        return not any(self.dims)

    @property
    def boundaries(self) -> frozenset[int]:
        """The strides between axes that a mesh must have for them to cut the array so."""
        runs = [run for dim in self.dims for run in dim or ()]
        return frozenset(edge for pieces, stride in runs for edge in (stride, stride * pieces))

    def __str__(self) -> str:
        words = ("any" if dim is None else "+".join(f"{n}@{stride}" for n, stride in dim) or "-" for dim in self.dims)
        return f"[{', '.join(words)}] of {self.devices} devices"


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same pieces by the fewest runs: runs whose devices follow each other are joined, and runs of one piece left
    out.
    """
    merged: list[tuple[int, int]] = []
    for pieces, stride in runs:
        if pieces == 1:
            continue
        if merged and merged[-1][1] == pieces * stride:
            merged[-1] = merged[-1][0] * pieces, stride
        else:
            merged.append((pieces, stride))
    return tuple(merged)
