"""A sharding rule: the dimensions of one operation that may be cut together, and what cutting leaves to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from passes.cluster import Mesh
from passes.device_placement import DevicePlacement
from passes.errors import InternalError
from passes.ir import Graph, Node, TensorType
from passes.rules.columns import Columns
from passes.sharding import ShardingSpec, is_placed, placed

Types = tuple[TensorType, ...]

Factors = tuple[tuple[int, ...], ...]
"""The number of the factor of each dimension of each array; -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A named dimension shared by operands and results.

    `size` must be divisible by the devices that cut it; 0 is a factor without a dimension, which any axis may take.
    Cutting a factor with a `reduction` leaves partial the results that lack it; `partial` lists operands that must come
    in partial.
    """

    size: int
    reduction: str = ""
    partial: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """The factors of one operation; `operands[o][d]` is the factor of dimension d of operand o, -1 if never cut.

    `flops` counts the whole operation; a convolution adds up `window` places a channel; of `sparse` operands, and
    of what it `slices`, only a result's elements are read. `light` operators are fused with neighbours and follow their
    sharding. An `alias` passes operand i through as result i in any placement. `reason` says why nothing can be cut.
    Users want the result `constrained` to certain devices, its dimensions `cut_by` certain axes (None: any), or have
    `pinned` the specs of (operands, results). What runs `once` does so on one device of all: every axis takes its first
    factor, which has no dimension, and the others add nothing to its results.

    What rewriting and lowering ask of an operator is said here too:

    `localized`        on pieces it is not the primitive as it stands: parameters name shapes or positions
    `shape_parameter`  the one parameter that does, where it is the shape of the result and nothing depends on the place
    `joins`            for each dimension of the operand that the result lacks, what joins the results of its pieces
    `places`           parameters that say where each operand lives, which the plan does
    `casts`            the result is the operand in another dtype
    `permutes`         the result is the operand in another order, which a product reads and writes as it likes
    `regroups`         the result has the elements in the order of the operand's, in other dimensions
    `convolves`        its operands are images and a kernel, whose order in memory and sizes matter on CPUs
    `selects`          it looks for an element of each window, one after another on CPUs
    `in_rows`          on CPUs its arrays lie row after row, whatever order a neighbour would have them in
    `draws`            it draws random numbers
    `accumulates`      it adds up cotangents of one value, in whatever order
    `sums`             it adds its operands, or takes the second from the first
    `picks`            what it takes is one of the arrays that are stacked in the operand, which products read there
    `splits`           (a dimension of the operand whose first part is the result's first, that of the result with the
                       rest of it)
    `moves`            (an operand, a dimension of it, one of results), of which one is never cut, though the elements
                       along them are the same in another order or number: a batch goes on as one
    `columns`          those of its matrices, of which each waits for the one before
    `groups`           each row of the product is for one of so many matrices; some compilers multiply it by all of them
    `attends`          times its flops that a kernel of attention computes: fewer behind a mask, more where it makes
                       scores again; 0 of any other operator
    `single`           a rule with factors of dimensions of one element, which nothing cuts: a batch may have one row

    Reference: Shardy's factor notation (openxla/shardy, sdy.op_sharding_rule); partial factors are ours.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    flops: float = 0.0
    window: float = 1.0
    light: bool = True
    alias: bool = False
    sparse: tuple[int, ...] = ()
    reason: str = ""
    constrained: DevicePlacement | None = None
    cut_by: tuple[tuple[str, ...] | None, ...] | None = None
    pinned: tuple[tuple[ShardingSpec, ...], ...] = ()
    once: bool = False
    localized: bool = False
    shape_parameter: str = ""
    joins: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    casts: bool = False
    permutes: bool = False
    regroups: bool = False
    convolves: bool = False
    selects: bool = False
    in_rows: bool = False
    draws: bool = False
    accumulates: bool = False
    sums: bool = False
    slices: bool = False
    picks: bool = False
    splits: tuple[tuple[int, int], ...] = ()
    moves: tuple[tuple[int, int, int], ...] = ()
    columns: Columns | None = None
    groups: int = 1
    attends: float = 0.0
    single: ShardingRule | None = None

    @property
    def is_product(self) -> bool:
        """Whether two operands are multiplied and summed over something that they share."""
        if len(self.operands) < 2 or self.light:
            return False
        summed = self._shared.difference(*self.results)
        return any(self.factors[factor].reduction == "add" for factor in summed)

    @property
    def read_in_part(self) -> tuple[int, ...]:
        """The operands of which as many elements are read as the result has."""
        return (0,) if self.slices else self.sparse

    @property
    def multiplies(self) -> bool:
        """Whether it is a product, or a kernel of attention, which has products inside."""
        return self.is_product or self.attends > 0

    @property
    def is_batched(self) -> bool:
        """Whether the first two operands share a dimension with the result, as attention's own products do."""
        return not all(self._shared.isdisjoint(result) for result in self.results)

    @property
    def _shared(self) -> frozenset[int]:
        """The factors that the first two operands share."""
        return frozenset(self.operands[0]).intersection(self.operands[1]) - {-1}

    def repeats(self, dim: int) -> bool:
        """Whether all pieces of the result along a dimension are equal."""
        factor = self.results[0][dim]
        return bool(self.shape_parameter) and factor >= 0 and not any(factor in dims for dims in self.operands)

    def with_single(self) -> ShardingRule:
        """The rule in which dimensions of one element have factors as others do."""
        if self.single is None:
            return self
        first, single = len(self.factors), self.single

        def dims(wide: Factors, ones: Factors) -> Factors:
            pairs = (zip(*each, strict=True) for each in zip(wide, ones, strict=True))
            return tuple(tuple(first + number if number >= 0 else factor for factor, number in dim) for dim in pairs)

        operands, results = dims(self.operands, single.operands), dims(self.results, single.results)
        return replace(self, factors=self.factors + single.factors, operands=operands, results=results)

    @property
    def adds(self) -> bool:
        """Whether operands may be partial together: the result is a sum of all, or has the elements of each."""
        return any(not f.size and len(f.partial) == len(self.operands) > 1 for f in self.factors)

    def cut_alike(self, node: Node, graph: Graph) -> list[tuple[int, int, int, int]]:
        """The (value read, dimension, value written, dimension) of as many elements that a `shard_map` of the user's
        cuts by the same axes: a batch goes on as one.
        """
        if not self.pinned:
            return []
        types = graph.types
        read, written = (
            [
                (v, d, axes, size)
                for v, spec in zip(values, side, strict=True)
                for d, (axes, size) in _cut(spec, types[v])
            ]
            for values, side in zip((node.inputs, node.outputs), self.pinned, strict=True)
        )
        return [(a, d, b, e) for a, d, axes, size in read for b, e, *also in written if also == [axes, size]]

    def operand_spec(self, operand: int, assignment: Assignment) -> ShardingSpec:
        """The placement that `operand` must have when each axis of `assignment` cuts its factor."""
        if self.pinned:
            return self.pinned[0][operand]
        partial = tuple(axis for axis, factor in assignment if operand in self.factors[factor].partial)
        return placed(_dims(self.operands[operand], assignment), partial, "add")

    def result_spec(self, result: int, assignment: Assignment) -> ShardingSpec:
        """The placement that `result` then has."""
        if self.pinned:
            return self.pinned[1][result]
        dims = self.results[result]
        reduced = [(axis, self.factors[factor].reduction) for axis, factor in assignment if factor not in dims]
        partial = tuple(axis for axis, reduction in reduced if reduction)
        kinds = {reduction for _, reduction in reduced if reduction}
        if len(kinds) > 1:
            raise InternalError(f"one result is partial by {sorted(kinds)} at once")
        return placed(_dims(dims, assignment), partial, kinds.pop() if kinds else "add")

    def allows(self, assignment: Assignment, mesh: Mesh) -> bool:
        """Whether every axis divides its factor and no result mixes reductions."""
        cut: dict[int, int] = {}
        for axis, factor in assignment:
            cut[factor] = cut.get(factor, 1) * mesh.axis_size(axis)
        if any(self.factors[factor].size and self.factors[factor].size % parts for factor, parts in cut.items()):
            return False
        return len({self.factors[factor].reduction for factor in cut} - {""}) <= 1

    def fulfils(self, assignment: Assignment, mesh: Mesh) -> bool:
        """Whether the result is placed as the user wants it, and what runs once is cut by every axis."""
        if self.once and len(assignment) < len(mesh.axes):
            return False
        dims = _dims(self.results[0], assignment) if self.is_bound else ()
        if self.cut_by is not None:
            return all(axes is None or axes == cut for axes, cut in zip(self.cut_by, dims, strict=True))
        return self.constrained is None or is_placed(dims, self.constrained, mesh)

    @property
    def is_bound(self) -> bool:
        """Whether the user says how the result is placed."""
        return self.constrained is not None or self.cut_by is not None

    @property
    def is_layout(self) -> bool:
        """Whether it only states the layout of its operand, or permutes its dimensions."""
        return self.permutes or self.is_bound

    def assignments(self, mesh: Mesh) -> list[Assignment]:
        """Every legal way to give each mesh axis one factor or none, axes that share a factor in every order."""
        options = (None, *range(len(self.factors)))
        assignments: dict[Assignment, None] = {}
        for order in itertools.permutations(mesh.axes):
            for picks in itertools.product(options, repeat=len(order)):
                pairs = tuple((axis, f) for axis, f in zip(order, picks, strict=True) if f is not None)
                assignment = canonical(pairs, mesh)
                if assignment not in assignments and self.allows(assignment, mesh) and self.fulfils(assignment, mesh):
                    assignments[assignment] = None
        return list(assignments)


Assignment = tuple[tuple[str, int], ...]
"""(mesh axis, factor) pairs; axes of one factor stand major first, factors in mesh order of their first axis."""


def canonical(pairs: Assignment, mesh: Mesh) -> Assignment:
    """The canonical form of an assignment: grouped by factor, groups in mesh order, order inside a group kept."""
    return in_order(pairs, mesh.axes)


def in_order(pairs: Assignment, axes: tuple[str, ...]) -> Assignment:
    """The canonical form of an assignment on any mesh with these axes."""
    groups: dict[int, list[str]] = {}
    for axis, factor in pairs:
        groups.setdefault(factor, []).append(axis)
    ordered = sorted(groups.items(), key=lambda item: min(map(axes.index, item[1])))
    return tuple([(axis, factor) for factor, names in ordered for axis in names])


def _cut(spec: ShardingSpec, type: TensorType) -> Iterator[tuple[int, tuple[tuple[str, ...], int]]]:
    """(a dimension that is cut, (the axes that cut it, its size)) of each."""
    return ((d, pair) for d, pair in enumerate(zip(spec.dims, type.shape, strict=True)) if pair[0])


@lru_cache(maxsize=1 << 16)
def _dims(factors: tuple[int, ...], assignment: Assignment) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for axis, cut in assignment if cut == f and f >= 0) for f in factors)
