"""Changing how a value lies on one mesh: the cheapest chain of single-axis steps, priced and spelled out alike.

The states of a value are its placements (sharding specs); the steps between them are those of XLA's own collectives.
`Resharder.seconds` holds the cost of the cheapest chain between any two placements, `Resharder.steps` the chain.

Reference: a chain of single-axis steps compiles exactly as planned where one jump does not (design/intra_op.md 1.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from passes import collectives
from passes.errors import InternalError
from passes.ir import TensorType
from passes.mesh import Mesh
from passes.sharding import ShardingSpec

StepKind = Literal["slice", "keep", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"]

Seconds = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One move. `slice` and `keep` are local; the others are one collective each.

    `slice` cuts dimension `to_dim` by `axes`; `keep` turns copies into partial sums (rank 0 keeps its copy, the others
    hold zeros); `all_gather` undoes the minor axis of `dim`; `all_to_all` moves it to `to_dim`; `all_reduce` finishes
    partial `axes`; `reduce_scatter` finishes one and cuts `to_dim` by it.
    """

    kind: StepKind
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1

    @property
    def is_local(self) -> bool:
        return self.kind in ("slice", "keep")

    def apply(self, spec: ShardingSpec) -> ShardingSpec:
        """The placement after this step."""
        dims = [list(axes) for axes in spec.dims]
        partial = tuple(axis for axis in spec.partial if axis not in self.axes)
        if self.kind in ("all_gather", "all_to_all") and tuple(dims[self.dim][-1:]) != self.axes:
            raise InternalError(f"{self} on {spec} gathers an axis that is not the minor one")
        if self.kind in ("all_gather", "all_to_all"):
            dims[self.dim].pop()
        if self.to_dim >= 0:
            dims[self.to_dim].extend(self.axes)
        if self.kind == "keep":
            partial = tuple(sorted((*spec.partial, *self.axes)))
        return placed(tuple(tuple(axes) for axes in dims), partial, spec.reduction)

    def __str__(self) -> str:
        where = f" {self.dim}" if self.dim >= 0 else ""
        return f"{self.kind}@{'+'.join(self.axes)}{where}" + (f"->{self.to_dim}" if self.to_dim >= 0 else "")


@lru_cache(maxsize=1 << 16)
def placed(dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...], reduction: str) -> ShardingSpec:
    """The canonical spec: partial axes sorted, and `add` where nothing is partial."""
    return ShardingSpec(dims=dims, partial=tuple(sorted(partial)), reduction=reduction if partial else "add")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """All single steps between the placements of one rank: `source[m]` to `target[m]` by `step[m]`.

    `parts` [placements, dimensions] are the devices that cut each dimension.
    `seams[:, m]` are the dimensions that collective m cuts and joins (-1: none), `seam_parts` the devices that cut what
    stands before them.
    """

    placements: tuple[ShardingSpec, ...]
    index: dict[ShardingSpec, int]
    parts: Indices
    steps: tuple[Step, ...]
    source: NDArray[np.intp]
    target: NDArray[np.intp]
    payload_parts: Seconds
    seams: NDArray[np.intp]
    seam_parts: Seconds
    classes: tuple[tuple[Step, NDArray[np.intp]], ...]


class Resharder:
    """Costs and steps of every resharding on one mesh; remembers what it has computed."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._moves: dict[tuple[int, str], _Moves] = {}
        self._closures: dict[tuple[TensorType, str], tuple[Seconds, Seconds]] = {}

    def placements(self, rank: int, reduction: str = "add") -> tuple[ShardingSpec, ...]:
        """Every placement of a value of this rank, divisible or not; partial ones with this reduction."""
        return self._moves_of(rank, reduction).placements

    def index(self, spec: ShardingSpec, reduction: str = "add") -> int:
        """The position of `spec` in `placements` and in the rows of `seconds`."""
        return self._moves_of(len(spec.dims), reduction).index[spec]

    def seconds(self, type: TensorType, reduction: str = "add") -> Seconds:
        """Seconds of the cheapest chain, [placements before, placements after]; infinite where no axis divides."""
        return self._closure(type, reduction)[0]

    def cost(self, type: TensorType, before: ShardingSpec, after: ShardingSpec) -> float:
        """Seconds of the cheapest chain from `before` to `after`; infinite where there is none."""
        if before == after:
            return 0.0
        reduction = before.reduction if before.partial else after.reduction
        if after.partial and after.reduction != reduction:
            return float("inf")
        return float(self.seconds(type, reduction)[self.index(before, reduction), self.index(after, reduction)])

    def matrix(self, type: TensorType, before: Sequence[ShardingSpec], after: Sequence[ShardingSpec]) -> Seconds:
        """`cost` of every pair, [before, after]."""
        if all(spec.reduction == "add" for spec in (*before, *after)):
            index = self._moves_of(type.rank, "add").index
            return self.seconds(type)[np.ix_([index[spec] for spec in before], [index[spec] for spec in after])]
        return np.array([[self.cost(type, source, target) for target in after] for source in before])

    def steps(self, type: TensorType, before: ShardingSpec, after: ShardingSpec) -> tuple[Step, ...]:
        """The cheapest chain from `before` to `after`. Raises InternalError where there is none."""
        reduction = before.reduction if before.partial else after.reduction
        moves = self._moves_of(type.rank, reduction)
        total, single = self._closure(type, reduction)
        here, there = moves.index[before], moves.index[after]
        if not np.isfinite(total[here, there]):
            raise InternalError(f"no chain of steps takes {type} from {before} to {after} on mesh {self.mesh}")
        chain: list[Step] = []
        while here != there:
            outgoing: NDArray[np.intp] = np.flatnonzero(moves.source == here)
            through = single[outgoing] + total[moves.target[outgoing], there]
            move = int(outgoing[int(np.argmin(through))])
            chain.append(moves.steps[move])
            here = int(moves.target[move])
        return tuple(chain)

    def _moves_of(self, rank: int, reduction: str) -> _Moves:
        key = (rank, reduction)
        if key not in self._moves:
            self._moves[key] = _enumerate_moves(self.mesh, rank, reduction)
        return self._moves[key]

    def _closure(self, type: TensorType, reduction: str) -> tuple[Seconds, Seconds]:
        key = (type, reduction)
        if key not in self._closures:
            moves = self._moves_of(type.rank, reduction)
            single = self._single_steps(type, moves)
            count = len(moves.placements)
            total = np.full((count, count), np.inf)
            np.minimum.at(total, (moves.source, moves.target), single)
            np.fill_diagonal(total, 0.0)
            self._closures[key] = (_shortest(total), single)
        return self._closures[key]

    def _single_steps(self, type: TensorType, moves: _Moves) -> Seconds:
        device = self.mesh.cluster.group().device
        cost = np.zeros(len(moves.steps))
        payload = type.nbytes / moves.payload_parts
        rearranged = _strided(type, moves) * payload
        strided = 1 / device.strided_bytes_per_second if device.strided_bytes_per_second else 0.0
        for step, members in moves.classes:
            copied = 2 * payload[members] / device.memory_bytes_per_second
            if step.kind == "slice" or step.kind == "keep":
                cost[members] = device.launch_seconds / 4 + copied
            else:
                group = self.mesh.group(step.axes)
                cost[members] = collectives.seconds(step.kind, payload[members], group) + device.launch_seconds
                cost[members] += strided * rearranged[members]
        divisible = (np.array(type.shape, dtype=np.int64) % moves.parts == 0).all(axis=1)
        if 0 in type.shape:  # never cut
            divisible &= (moves.parts == 1).all(axis=1)
        cost[~(divisible[moves.source] & divisible[moves.target])] = np.inf
        return cost


def _strided(type: TensorType, moves: _Moves) -> Seconds:
    """How many of a move's seams run through dimensions that have something before them."""
    leading = np.cumprod((1, *type.shape), dtype=np.float64)[moves.seams] / moves.seam_parts
    return ((moves.seams >= 0) & (leading > 1)).sum(axis=0).astype(np.float64)


def _parts(mesh: Mesh, spec: ShardingSpec) -> list[int]:
    return [math.prod(map(mesh.axis_size, axes)) for axes in spec.dims]


def _enumerate_moves(mesh: Mesh, rank: int, reduction: str) -> _Moves:
    placements = tuple(_placements(mesh.axes, rank, reduction))
    index = {spec: i for i, spec in enumerate(placements)}
    steps: list[Step] = []
    ends: list[tuple[int, int]] = []
    parts: list[float] = []
    seams: list[tuple[int, int]] = []
    seam_parts: list[tuple[float, ...]] = []
    for spec in placements:
        for step in _single(spec, mesh.axes, rank):
            after = step.apply(spec)
            if after not in index:
                continue
            steps.append(step)
            ends.append((index[spec], index[after]))
            held = [math.prod(_parts(mesh, s)) for s in (spec, after)]
            parts.append(float(held[1] if step.kind == "slice" else min(held)))
            ends_at = (-1, -1) if step.is_local else (step.dim, step.to_dim)
            seams.append(ends_at)
            seam_parts.append(tuple(float(math.prod(_parts(mesh, spec)[: max(d, 0)])) for d in ends_at))
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for i, step in enumerate(steps):
        groups.setdefault((step.kind, step.axes), []).append(i)
    source, target = np.array(ends, dtype=np.intp).reshape(-1, 2).T
    classes = tuple((steps[members[0]], np.array(members, dtype=np.intp)) for members in groups.values())
    return _Moves(
        placements=placements,
        index=index,
        parts=np.array([_parts(mesh, spec) for spec in placements], dtype=np.intp).reshape(len(placements), rank),
        steps=tuple(steps),
        source=source,
        target=target,
        payload_parts=np.array(parts),
        seams=np.array(seams, dtype=np.intp).reshape(-1, 2).T,
        seam_parts=np.array(seam_parts).reshape(-1, 2).T,
        classes=classes,
    )


def _placements(axes: tuple[str, ...], rank: int, reduction: str) -> list[ShardingSpec]:
    """Replicated first; every axis is unused, partial, or on one dimension in every order."""
    found: dict[ShardingSpec, None] = {}
    for seats in itertools.product((None, *range(rank), "partial"), repeat=len(axes)):
        partial = tuple(axis for axis, seat in zip(axes, seats, strict=True) if seat == "partial")
        by_dim = [[axis for axis, seat in zip(axes, seats, strict=True) if seat == d] for d in range(rank)]
        for dims in itertools.product(*(itertools.permutations(used) for used in by_dim)):
            found[placed(tuple(dims), partial, reduction)] = None
    return list(found)


def _single(spec: ShardingSpec, axes: tuple[str, ...], rank: int) -> list[Step]:
    """Every step that leaves `spec`."""
    idle = [axis for axis in axes if axis not in spec.axes]
    found = [Step(kind="slice", axes=(axis,), to_dim=dim) for axis in idle for dim in range(rank)]
    if spec.reduction == "add":
        found += [Step(kind="keep", axes=(axis,)) for axis in idle]
    for dim, held in enumerate(spec.dims):
        if held:
            found.append(Step(kind="all_gather", axes=held[-1:], dim=dim))
            found += [Step(kind="all_to_all", axes=held[-1:], dim=dim, to_dim=to) for to in range(rank) if to != dim]
    for count in range(1, len(spec.partial) + 1):
        found += [Step(kind="all_reduce", axes=some) for some in itertools.combinations(spec.partial, count)]
    if spec.partial and spec.reduction == "add":
        found += [Step(kind="reduce_scatter", axes=(axis,), to_dim=dim) for axis in spec.partial for dim in range(rank)]
    return found


def _shortest(total: Seconds) -> Seconds:
    """Min-plus closure by repeated squaring."""
    while True:
        through = np.min(total[:, :, None] + total[None, :, :], axis=1)
        if np.array_equal(through, total):
            return total
        total = through
