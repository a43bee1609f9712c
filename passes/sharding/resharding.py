"""Reshardings on one mesh: the cheapest chain of single-axis steps between two placements, and its seconds.

The states of a value are its placements (sharding specs); the steps between them are those of XLA's own collectives.
`Resharder.seconds` holds the cost of the cheapest chain between any two placements, `Resharder.steps` the chain.

A chain of single-axis steps compiles exactly as planned where one jump does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from passes.cluster import CPU, Mesh, collectives
from passes.errors import InternalError
from passes.ir import TensorType
from passes.sharding.behind import PACKED_NBYTES, Behind, Seconds, packs
from passes.sharding.spec import ShardingSpec

StepKind = Literal["slice", "keep", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"]

Indices = NDArray[np.intp]

T = TypeVar("T")

_LOCAL_LAUNCHES = 0.25
"""Kernel launches that a step without a collective costs beside its copy, assumed: XLA fuses most such steps with their
readers. It is above zero so that of equally fast chains the one of fewer steps is taken. `python -m
benchmarks.settings` shows that plans hardly depend on it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a resharding. `slice` and `keep` are local; the others are one collective each.

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
    """The canonical spec: partial axes are sorted, and the reduction is `add` if nothing is partial."""
    return ShardingSpec(dims=dims, partial=tuple(sorted(partial)), reduction=reduction if partial else "add")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routes:
    """All single steps between the placements of one rank, on any mesh: step m leads from `source[m]` to `target[m]`.

    `cuts` [placements, dimensions, axes] says which axes cut which dimension. `seams[:, m]` are the dimensions that
    collective m cuts and joins (-1: none). `classes` are the moves of one kind and axes.
    """

    placements: tuple[ShardingSpec, ...]
    index: dict[ShardingSpec, int]
    cuts: NDArray[np.bool_]
    steps: tuple[Step, ...]
    source: Indices
    target: Indices
    seams: Indices
    classes: tuple[tuple[Step, Indices], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """The single steps on one mesh; `parts` [placements, dimensions] is the number of devices that cut each dimension.

    `payload_parts` [moves] are the devices that share what is sent; `seam_parts` are those that cut the dimensions
    before the seams.
    """

    routes: _Routes
    parts: Indices
    payload_parts: Seconds
    seam_parts: Seconds


class Resharder:
    """The seconds and steps of every resharding on one mesh, each computed once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._moves: dict[tuple[int, str], _Moves] = {}
        self._closures: dict[tuple[TensorType, str, Behind | None], Seconds] = {}
        self._singles: dict[tuple[TensorType, str], Seconds] = {}
        self._chains: dict[tuple[TensorType, str], Indices] = {}
        self._kept: dict[object, object] = {}

    def kept(self, make: Callable[[Resharder], T]) -> T:
        """The result of `make` for this mesh, computed once: a cache for other passes, which lives as long as this."""
        if make not in self._kept:
            self._kept[make] = make(self)
        return cast("T", self._kept[make])

    def placements(self, rank: int, reduction: str = "add") -> tuple[ShardingSpec, ...]:
        """Every placement of a value of this rank, divisible or not; partial ones with this reduction."""
        return self._moves_of(rank, reduction).routes.placements

    def index(self, spec: ShardingSpec, reduction: str = "add") -> int:
        """The index of `spec` in `placements` and in the rows of `seconds`."""
        return self._moves_of(len(spec.dims), reduction).routes.index[spec]

    def seconds(self, type: TensorType, reduction: str = "add", behind: Behind | None = None) -> Seconds:
        """Seconds of the cheapest chain, [placements before, placements after]; infinite where no axis divides.

        If it is `behind` computing, only the seconds that prolong the step; `steps` has the same chain for both.
        """
        device = self.mesh.cluster.group().device
        if not (device.bucket_nbytes or device.collective_overlap or packs(self.mesh)):
            behind = None
        key = (type, reduction, behind)
        if key not in self._closures:
            single = self._single_steps(type, reduction, behind)
            along = self._shortest if behind is None else self._along_chains
            self._closures[key] = along(type, reduction, single)
        return self._closures[key]

    def cost(self, type: TensorType, before: ShardingSpec, after: ShardingSpec, behind: Behind | None = None) -> float:
        """Seconds of the cheapest chain from `before` to `after`; infinite where there is none.

        If it is `behind` computing, only the seconds that prolong the step.
        """
        if before == after:
            return 0.0
        reduction = before.reduction if before.partial else after.reduction
        if after.partial and after.reduction != reduction:
            return float("inf")
        return float(self.seconds(type, reduction, behind)[self.index(before, reduction), self.index(after, reduction)])

    def matrix(
        self,
        type: TensorType,
        before: Sequence[ShardingSpec],
        after: Sequence[ShardingSpec],
        behind: Behind | None = None,
    ) -> Seconds:
        """Seconds of the cheapest chain for every pair [before, after], as `cost` computes them."""
        if all(spec.reduction == "add" for spec in (*before, *after)):
            index = self._moves_of(type.rank, "add").routes.index
            rows, columns = ([index[spec] for spec in specs] for specs in (before, after))
            return self.seconds(type, behind=behind)[np.ix_(rows, columns)]
        return np.array([[self.cost(type, source, target, behind) for target in after] for source in before])

    def steps(self, type: TensorType, before: ShardingSpec, after: ShardingSpec) -> tuple[Step, ...]:
        """The cheapest chain from `before` to `after`. Raises InternalError where there is none."""
        reduction = before.reduction if before.partial else after.reduction
        moves = self._moves_of(type.rank, reduction)
        at, goal = moves.routes.index[before], moves.routes.index[after]
        if not np.isfinite(self.seconds(type, reduction)[at, goal]):
            raise InternalError(f"no chain of steps takes {type} from {before} to {after} on mesh {self.mesh}")
        chain: list[Step] = []
        while at != goal:
            move = int(self._chain(type, reduction)[at, goal])
            chain.append(moves.routes.steps[move])
            at = int(moves.routes.target[move])
        return tuple(chain)

    @property
    def hides_gathers(self) -> bool:
        """Whether a gather runs behind computing, so that it is worth starting early."""
        return self.mesh.cluster.group().device.collective_overlap > 0

    def is_packed(self, type: TensorType, after: ShardingSpec, steps: Sequence[Step]) -> bool:
        """Whether a program packs a reduction of a value by these `steps` with others that do not wait for it."""
        small = packs(self.mesh) and after.local_nbytes(type, self.mesh) <= PACKED_NBYTES
        return small and {step.kind for step in steps} == {"all_reduce"}

    def _moves_of(self, rank: int, reduction: str) -> _Moves:
        key = (rank, reduction)
        if key not in self._moves:
            self._moves[key] = _moves(self.mesh, _routes(self.mesh.axes, rank, reduction))
        return self._moves[key]

    def _shortest(self, type: TensorType, reduction: str, single: Seconds) -> Seconds:
        """Seconds of the cheapest chain between any two placements, from the seconds of every single step."""
        routes = self._moves_of(type.rank, reduction).routes
        total = np.full((len(routes.placements), len(routes.placements)), np.inf)
        np.minimum.at(total, (routes.source, routes.target), single)
        np.fill_diagonal(total, 0.0)
        return _shortest(total)

    def _along_chains(self, type: TensorType, reduction: str, single: Seconds) -> Seconds:
        """Seconds of the chain of `steps` between any two placements, whatever the single steps take."""
        moves, chain = self._moves_of(type.rank, reduction), self._chain(type, reduction)
        reached = np.isfinite(self.seconds(type, reduction))
        goals = np.arange(len(chain))
        total = np.where(reached, 0.0, np.inf)
        at: Indices = np.broadcast_to(goals[:, None], chain.shape).copy()
        while (going := reached & (at != goals)).any():
            rows, columns = np.nonzero(going)
            move = chain[at[rows, columns], columns]
            total[rows, columns] += single[move]
            at[rows, columns] = moves.routes.target[move]
        return total

    def _chain(self, type: TensorType, reduction: str) -> Indices:
        """The single step that the cheapest chain starts with, [before, after]; -1 where there is none."""
        key = (type, reduction)
        if key not in self._chains:
            moves, total = self._moves_of(type.rank, reduction), self.seconds(type, reduction)
            single = self._single_steps(type, reduction, None)
            through = single[:, None] + total[moves.routes.target]
            chain: Indices = np.full(total.shape, -1, dtype=np.intp)
            for at in np.unique(moves.routes.source):
                outgoing: Indices = np.flatnonzero(moves.routes.source == at)
                chain[at] = outgoing[through[outgoing].argmin(axis=0)]
            self._chains[key] = chain
        return self._chains[key]

    def _single_steps(self, type: TensorType, reduction: str, behind: Behind | None) -> Seconds:
        """Seconds of every single step; infinite where an axis does not divide its dimension, or the kind is
        forbidden.
        """
        if behind is not None:
            return self._step_seconds(type, self._moves_of(type.rank, reduction), behind)
        key = (type, reduction)
        if key not in self._singles:
            self._singles[key] = self._step_seconds(type, self._moves_of(type.rank, reduction), None)
        return self._singles[key]

    def _step_seconds(self, type: TensorType, moves: _Moves, behind: Behind | None) -> Seconds:
        """Seconds of every single step, as `_single_steps` has them.

        On CPUs and GPUs a collective that cuts or joins a dimension inside others moves pieces with that dimension
        first. If elements change their order at no cost, the larger side has a layout that suits its readers, and the
        smaller side is copied. TPUs move tiles.
        """
        device = self.mesh.cluster.group().device
        cost = np.zeros(len(moves.routes.steps))
        payload = type.nbytes / moves.payload_parts
        rearranged = _strided(type, moves) * payload
        strided = 1 / device.strided_bytes_per_second if device.strided_bytes_per_second else 0.0
        in_rows = not strided and (device.cores > 0 or device.name == CPU)
        for step, members in moves.routes.classes:
            copied = 2 * payload[members] / device.memory_bytes_per_second
            if step.kind in self.mesh.forbidden:
                cost[members] = np.inf
            elif step.kind == "slice" or step.kind == "keep":
                cost[members] = _LOCAL_LAUNCHES * device.launch_seconds + copied
            else:
                group = self.mesh.group(step.axes)
                cost[members] = collectives.seconds(step.kind, payload[members], group)
                if behind is not None and step.kind in behind.kinds:
                    together = behind.together(step.kind, payload[members], self.mesh, step.axes)
                    everything = payload[members] * (behind.sent_nbytes / max(type.nbytes, 1))
                    exposed = 1 - behind.hidden(collectives.seconds(step.kind, everything, group), self.mesh)
                    cost[members] = exposed * np.minimum(cost[members], together)
                # In a bucket, the launch is that of the kernel that packs the array.
                cost[members] += device.launch_seconds + strided * rearranged[members]
                if in_rows:
                    parts = 1 if step.kind == "all_to_all" else math.prod(map(self.mesh.axis_size, step.axes))
                    cost[members] += 2 * rearranged[members] / parts / device.memory_bytes_per_second
        divisible = (np.array(type.shape, dtype=np.int64) % moves.parts == 0).all(axis=1)
        if 0 in type.shape:  # never cut
            divisible &= (moves.parts == 1).all(axis=1)
        cost[~(divisible[moves.routes.source] & divisible[moves.routes.target])] = np.inf
        return cost


def _strided(type: TensorType, moves: _Moves) -> Seconds:
    """The number of dimensions [steps] that a collective cuts or joins inside others, copying with strides."""
    seams = moves.routes.seams
    leading = np.cumprod((1, *type.shape), dtype=np.float64)[seams] / moves.seam_parts
    return ((seams >= 0) & (leading > 1)).sum(axis=0).astype(np.float64)


def _moves(mesh: Mesh, routes: _Routes) -> _Moves:
    """The single steps on a mesh, with the devices that cut every dimension."""
    parts: Indices = np.where(routes.cuts, np.array(mesh.sizes, dtype=np.intp), 1).prod(axis=2)
    # [placements, dimensions + 1], the devices that cut what stands before a dimension
    leading: Indices = np.cumprod(np.insert(parts, 0, 1, axis=1), axis=1, dtype=np.intp)
    parts_before: Indices = leading[routes.source, -1]
    parts_after: Indices = leading[routes.target, -1]
    slices = np.array([step.kind == "slice" for step in routes.steps], dtype=bool)
    return _Moves(
        routes=routes,
        parts=parts,
        payload_parts=np.where(slices, parts_after, np.minimum(parts_before, parts_after)).astype(np.float64),
        seam_parts=leading[routes.source, np.maximum(routes.seams, 0)].astype(np.float64),
    )


@lru_cache(maxsize=256)
def _routes(axes: tuple[str, ...], rank: int, reduction: str) -> _Routes:
    """The single steps between the placements of a rank; they do not depend on the sizes of the axes."""
    placements = tuple(_placements(axes, rank, reduction))
    index = {spec: i for i, spec in enumerate(placements)}
    transitions = [
        (step, index[spec], index[after])
        for spec in placements
        for step in _single(spec, axes, rank)
        if (after := step.apply(spec)) in index
    ]
    steps = tuple(step for step, _, _ in transitions)
    seams = [(-1, -1) if step.is_local else (step.dim, step.to_dim) for step in steps]
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for i, step in enumerate(steps):
        groups.setdefault((step.kind, step.axes), []).append(i)
    cuts = [[[axis in dim for axis in axes] for dim in spec.dims] for spec in placements]
    source, target = np.array([ends for _, *ends in transitions], dtype=np.intp).reshape(-1, 2).T
    return _Routes(
        placements=placements,
        index=index,
        cuts=np.array(cuts, dtype=bool).reshape(len(placements), rank, len(axes)),
        steps=steps,
        source=source,
        target=target,
        seams=np.array(seams, dtype=np.intp).reshape(-1, 2).T,
        classes=tuple((steps[members[0]], np.array(members, dtype=np.intp)) for members in groups.values()),
    )


def _placements(axes: tuple[str, ...], rank: int, reduction: str) -> list[ShardingSpec]:
    """All placements of a rank, replicated first: every axis is unused, partial, or on one dimension in every order."""
    specs: dict[ShardingSpec, None] = {}
    for uses in itertools.product((None, *range(rank), "partial"), repeat=len(axes)):
        partial = tuple(axis for axis, use in zip(axes, uses, strict=True) if use == "partial")
        by_dim = [[axis for axis, use in zip(axes, uses, strict=True) if use == d] for d in range(rank)]
        for dims in itertools.product(*(itertools.permutations(used) for used in by_dim)):
            specs[placed(tuple(dims), partial, reduction)] = None
    return list(specs)


def _single(spec: ShardingSpec, axes: tuple[str, ...], rank: int) -> list[Step]:
    """Every single step that can follow `spec`."""
    idle = [axis for axis in axes if axis not in spec.axes]
    steps = [Step(kind="slice", axes=(axis,), to_dim=dim) for axis in idle for dim in range(rank)]
    if spec.reduction == "add":
        steps += [Step(kind="keep", axes=(axis,)) for axis in idle]
    for dim, minor_axes in enumerate(spec.dims):
        if minor_axes:
            steps.append(Step(kind="all_gather", axes=minor_axes[-1:], dim=dim))
            steps += [
                Step(kind="all_to_all", axes=minor_axes[-1:], dim=dim, to_dim=to) for to in range(rank) if to != dim
            ]
    for count in range(1, len(spec.partial) + 1):
        steps += [Step(kind="all_reduce", axes=some) for some in itertools.combinations(spec.partial, count)]
    if spec.partial and spec.reduction == "add":
        steps += [Step(kind="reduce_scatter", axes=(axis,), to_dim=dim) for axis in spec.partial for dim in range(rank)]
    return steps


def _shortest(total: Seconds) -> Seconds:
    """The shortest paths between all pairs, written over the single steps (Floyd-Warshall)."""
    through = np.empty_like(total)
    for middle in range(len(total)):
        np.minimum(total, np.add(total[:, middle, None], total[middle], out=through), out=total)
    return total
