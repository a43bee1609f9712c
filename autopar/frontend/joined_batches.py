"""The changes after which a step joins batches in groups, so that no device needs rows of others for it.

Preference optimization sends chosen and rejected answers through one network, self-supervised learning several views
of an image, semi-supervised learning labelled images with others. Batches a and b of 4 rows each on two devices, of
which one has a0 a1 b0 b1 and the other a2 a3 b2 b3:

    joined in the program's order    a0 a1 a2 a3 | b0 b1 b2 b3     a device needs rows that the other has
    joined in two groups             a0 a1 b0 b1 | a2 a3 b2 b3     each has all that it needs

All that computes row by row, or adds up rows, takes them in any order; where the place of a row matters, the program's
order is restored before. Dimensions that operators cut together are one class (`passes.layers.DimClasses`), and all in
the same order. The batch's sizes have a divisor in common, and that is the number of groups: it suits any number of
devices that divides the batch. `passes` plans the changed program, which `regrouping` writes.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.frontend.places import Part, Whole, place_factors, wholes_of
from passes.ir import Control, Graph, Node, StatePairs, control_of
from passes.layers import DimClasses, Numbering, batch_inputs
from passes.rules import ShardingRule, rules_of

WORTH = 2
"""The bytes joined or taken apart in groups that there must be for every byte put into another order, chosen.

Either moves most of its rows between devices. What saves less than twice what it moves is left as it is written: the
saving is not sure, as other dimensions may be sharded.
"""


@dataclass(frozen=True, slots=True)
class Order:
    """The order of elements along a dimension that is joined of pieces of these `sizes`: in `groups` groups, each with
    its share of every piece. Two groups of (4, 2) are a0 a1 b0 | a2 a3 b1.
    """

    groups: int
    sizes: tuple[int, ...]


Orders = Mapping[int, Order]
"""The order along each dimension of a value that is in groups; others are in the program's own order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """The change of one node: it joins batches in `groups` groups (`is_join`), or takes them apart, `along` these
    dimensions, each with the number of its parts.

    The values at these positions among its `operands` are in groups, and are put into the program's order first;
    `results` are in the program's order, and are put into groups afterwards.
    """

    along: Mapping[int, int] = field(default_factory=dict[int, int])
    is_join: bool = False
    groups: int = 1
    operands: Mapping[int, Orders] = field(default_factory=dict[int, Orders])
    results: Mapping[int, Orders] = field(default_factory=dict[int, Orders])


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes of a program: of nodes, and of the bodies of nodes, by (node, number of the body).

    Inputs and constants among `values` come in the program's order, and are put into groups first; `outputs`, by
    position, leave in it, and are put back last.
    """

    nodes: Mapping[int, NodeChange]
    bodies: Mapping[tuple[int, int], Changes]
    values: Mapping[int, Orders]
    outputs: Mapping[int, Orders]

    @property
    def is_none(self) -> bool:
        """Whether nothing changes."""
        return not (self.nodes or self.values or self.outputs or any(not c.is_none for c in self.bodies.values()))


def joined_batches(graph: Graph, state_pairs: StatePairs = (), named: Sequence[bool] = ()) -> Changes | None:
    """The changes after which joined batches are in groups; None if no batches are joined, or if too many bytes would
    be put into another order.

    `named` says which inputs the user calls the batch, as for `batch_inputs`.
    """
    batch = [graph.inputs[i] for i in batch_inputs(graph, state_pairs, named)]
    groups = math.gcd(*(graph.types[value].shape[0] for value in batch)) if batch else 1
    if groups == 1 or not _may_join(graph, groups):
        return None
    dims = DimClasses(multiple=groups)
    top = dims.add(graph)
    classes = _JoinedClasses(groups=groups, dims=dims, scopes=tuple(_scopes(graph, top)))
    classes.settle({dims.root(top.firsts[value]) for value in batch})
    return _changes(classes, 0) if classes.shares else None


def _may_join(graph: Graph, groups: int) -> bool:
    """Whether a program joins several arrays along a dimension of which each has a multiple of `groups` elements."""
    for node in graph.nodes:
        for whole in wholes_of(graph, node, groups):
            if (
                whole.is_join
                and len(whole.parts) > 1
                and not any(part.extent % (groups * part.scale) for part in whole.parts)
            ):
                return True
    return any(_may_join(body, groups) for node in graph.nodes for body in node.subgraphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """The program or a body in it: its graph with the numbers of its dimensions; it runs `times` times a step.

    `bodies` are the positions, among all scopes, of the bodies of its loops and branches, by (node, number of the
    body).
    """

    graph: Graph
    numbering: Numbering
    rules: tuple[ShardingRule, ...]
    times: int
    controls: Mapping[int, Control]
    bodies: Mapping[tuple[int, int], int]


def _scopes(graph: Graph, numbering: Numbering, times: int = 1, number: int = 0) -> list[_Scope]:
    """The scope of a graph that is the `number`-th, and those of the bodies in it."""
    controls = {i: control_of(graph.nodes[i], graph) for i in numbering.bodies}
    known = {i: control for i, control in controls.items() if control is not None}
    inner: list[_Scope] = []
    bodies: dict[tuple[int, int], int] = {}
    for i, control in known.items():
        for which, (body, inside) in enumerate(zip(control.bodies, numbering.bodies[i], strict=True)):
            bodies[i, which] = number + 1 + len(inner)
            inner += _scopes(body.graph, inside, times * body.trips, bodies[i, which])
    rules = rules_of(graph)
    return [_Scope(graph=graph, numbering=numbering, rules=rules, times=times, controls=known, bodies=bodies), *inner]


@dataclass(frozen=True, slots=True)
class _Restored:
    """A dimension of a value in groups that a node needs in the program's order, at this operand or result.

    Changing the order sends rows between devices (`is_sent`) unless each device has all of them.
    """

    is_result: bool
    position: int
    value: int
    dim: int
    is_sent: bool


@dataclass(slots=True, kw_only=True)
class _JoinedClasses:
    """The classes of dimensions that are joined of batches, and the order along each.

    `shares` are the relative sizes of the pieces that a class is joined of: (1, 3) for labelled rows and three times as
    many others. Classes that are `rejected` stay as they are written.
    """

    groups: int
    dims: DimClasses
    scopes: tuple[_Scope, ...]
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    rejected: set[int] = field(default_factory=set[int])

    def settle(self, batch: set[int]) -> None:
        """Finds the classes that are joined of pieces of the `batch`; anew without those that are not worth it."""
        while True:
            self.shares = {}
            n_known = -1
            while len(self.shares) > n_known:  # what one pass finds may let the next find more
                n_known = len(self.shares)
                for scope in self.scopes:
                    for node in scope.graph.nodes:
                        self._add_shares(scope, node, batch)
            rejected = self._uneven() or self._not_worth()
            if not rejected:
                return
            self.rejected |= rejected

    def root(self, scope: _Scope, value: int, dim: int) -> int:
        """The class of a dimension."""
        return self.dims.root(scope.numbering.firsts[value] + dim)

    def pieces(self, scope: _Scope, value: int, dim: int) -> tuple[int, ...] | None:
        """The sizes of the pieces that a dimension is joined of, itself if that is not; None where the groups do not
        divide them.
        """
        extent = scope.graph.types[value].shape[dim]
        shares = self.shares.get(self.root(scope, value, dim), (1,))
        unit, rest = divmod(extent, sum(shares))
        return None if rest or any(unit * w % self.groups for w in shares) else tuple(unit * w for w in shares)

    def orders(self, scope: _Scope, value: int) -> dict[int, Order]:
        """The order along each dimension of a value that is in groups."""
        orders: dict[int, Order] = {}
        for dim in range(scope.graph.types[value].rank) if self.shares else ():
            if self.root(scope, value, dim) in self.shares:
                orders[dim] = Order(self.groups, self.pieces(scope, value, dim) or ())
        return orders

    def _add_shares(self, scope: _Scope, node: Node, batch: set[int]) -> None:
        """Adds the shares of the classes that a node says are joined of the batch, or of such classes.

        Those are the whole that it joins, or a part of several pieces that it takes of another whole.
        """
        for whole in wholes_of(scope.graph, node, self.groups):
            if whole.is_join and len(whole.parts) > 1:
                pieces = [self._pieces_of(scope, part) for part in whole.parts]
                roots = {self.root(scope, part.value, part.dim) for part in whole.parts}
                if all(pieces) and not roots.isdisjoint(batch.union(self.shares)):
                    root = self.root(scope, whole.value, whole.dim)
                    self._add_share(root, tuple(itertools.chain.from_iterable(pieces)))
            else:
                for part in whole.parts:
                    pieces_there = self._pieces_at(scope, whole, part)
                    if len(pieces_there) > 1 and not any(n % part.scale for n in pieces_there):
                        self._add_share(self.root(scope, part.value, part.dim), pieces_there)

    def _add_share(self, root: int, pieces: tuple[int, ...]) -> None:
        """Adds a class that is joined of pieces of these sizes, unless it is known or rejected."""
        if root not in self.shares and root not in self.rejected:
            common = math.gcd(*pieces)
            self.shares[root] = tuple(piece // common for piece in pieces)

    def _pieces_of(self, scope: _Scope, part: Part) -> tuple[int, ...]:
        """The sizes of the pieces that a part is joined of, in elements of its whole; none where the groups do not
        divide them.
        """
        return tuple(n * part.scale for n in self.pieces(scope, part.value, part.dim) or ())

    def _pieces_at(self, scope: _Scope, whole: Whole, part: Part) -> tuple[int, ...]:
        """The sizes of a whole's pieces at the place of a part; none where that begins or ends inside one."""
        is_joined = self.root(scope, whole.value, whole.dim) in self.shares
        pieces = (self.pieces(scope, whole.value, whole.dim) if is_joined else None) or ()
        ends = [0, *itertools.accumulate(pieces)]
        if part.begin not in ends or part.begin + part.extent not in ends:
            return ()
        return pieces[ends.index(part.begin) : ends.index(part.begin + part.extent)]

    def wholes_in_groups(self, scope: _Scope, node: Node) -> list[Whole]:
        """The dimensions along which a node joins batches in groups, or takes them apart: each part is made of the
        pieces that the whole has at its place.
        """
        return [
            whole
            for whole in wholes_of(scope.graph, node, self.groups)
            if all(
                (there := self._pieces_at(scope, whole, part)) and there == self._pieces_of(scope, part)
                for part in whole.parts
            )
        ]

    def _uneven(self) -> set[int]:
        """The classes with a dimension that cannot be divided as the pieces are."""
        uneven: set[int] = set()
        for scope in self.scopes:
            for value, type in enumerate(scope.graph.types):
                for dim in range(type.rank):
                    root = self.root(scope, value, dim)
                    if root in self.shares and self.pieces(scope, value, dim) is None:
                        uneven.add(root)
        return uneven

    def _not_worth(self) -> set[int]:
        """The classes of which too many bytes would be put into another order, for those joined or parted in groups."""
        saved: dict[int, float] = defaultdict(float)
        moved: dict[int, float] = defaultdict(float)
        for number, scope in enumerate(self.scopes):
            graph = scope.graph
            nbytes = [type.nbytes * scope.times for type in graph.types]
            for index, node in enumerate(graph.nodes):
                for whole in self.wholes_in_groups(scope, node):
                    saved[self.root(scope, whole.value, whole.dim)] += nbytes[whole.value]
                for restored in self.restored(scope, index):
                    root = self.root(scope, restored.value, restored.dim)
                    moved[root] += nbytes[restored.value] * restored.is_sent
            around = (*graph.inputs, *graph.outputs) if number == 0 else ()
            for value in (*graph.constants, *around):
                for dim in self.orders(scope, value):
                    moved[self.root(scope, value, dim)] += nbytes[value]
        return {root for root in self.shares if WORTH * moved[root] > saved[root]}

    def restored(self, scope: _Scope, index: int) -> Iterator[_Restored]:
        """The dimensions along which a node has values in the program's order.

        What a node takes whole along a dimension is on every device, and so are positions and random numbers.
        """
        node, rule = scope.graph.nodes[index], scope.rules[index]
        wholes = self.wholes_in_groups(scope, node)
        in_groups = {(place.value, place.dim) for whole in wholes for place in (whole, *whole.parts)}
        if index in scope.controls:
            control = scope.controls[index]
            for is_result, values, uses in (
                (False, node.inputs, control.operands),
                (True, node.outputs, control.results),
            ):
                for position, (value, use) in enumerate(zip(values, uses, strict=True)):
                    if use.stacked and 0 in self.orders(scope, value):
                        yield _Restored(is_result, position, value, 0, is_sent=False)
            return
        by_place = place_factors(node, rule)
        is_made = rule.draws or not node.inputs
        for is_result, side, values in ((False, rule.operands, node.inputs), (True, rule.results, node.outputs)):
            for position, (factors, value) in enumerate(zip(side, values, strict=True)):
                orders = self.orders(scope, value) if not rule.alias else {}
                restored: list[int] = []
                for dim in orders:
                    factor = factors[dim]
                    is_class = factor >= 0 and not rule.factors[factor].size % self.groups
                    if (value, dim) not in in_groups and not (is_class and factor not in by_place):
                        restored.append(dim)
                for dim in restored:
                    is_whole = factors[dim] < 0 or (is_made and len(set(orders[dim].sizes)) == 1)
                    is_cut_elsewhere = any(
                        self.root(scope, value, d) == self.root(scope, value, dim) for d in orders if d not in restored
                    )
                    yield _Restored(is_result, position, value, dim, is_sent=not (is_whole or is_cut_elsewhere))


def _changes(classes: _JoinedClasses, number: int) -> Changes:
    """The changes of the scope of this number and of the bodies in it."""
    scope = classes.scopes[number]
    graph = scope.graph
    nodes: dict[int, NodeChange] = {}
    for index, node in enumerate(graph.nodes):
        sides: tuple[dict[int, dict[int, Order]], ...] = ({}, {})
        for restored in classes.restored(scope, index):
            if restored.is_result or not _is_same(scope, restored.value, restored.dim):
                orders = sides[restored.is_result].setdefault(restored.position, {})
                orders[restored.dim] = classes.orders(scope, restored.value)[restored.dim]
        in_groups = classes.wholes_in_groups(scope, node)
        if in_groups or any(sides):
            operands, results = sides
            nodes[index] = NodeChange(
                along={whole.dim: len(whole.parts) for whole in in_groups},
                is_join=any(whole.is_join for whole in in_groups),
                groups=classes.groups,
                operands=operands,
                results=results,
            )
    entering = (*graph.constants, *(graph.inputs if number == 0 else ()))
    leaving = graph.outputs if number == 0 else ()
    return Changes(
        nodes=nodes,
        bodies={place: _changes(classes, inner) for place, inner in scope.bodies.items()},
        values={value: orders for value in entering if (orders := classes.orders(scope, value))},
        outputs={i: orders for i, value in enumerate(leaving) if (orders := classes.orders(scope, value))},
    )


def _is_same(scope: _Scope, value: int, dim: int) -> bool:
    """Whether all elements of a value along a dimension are equal, so that their order does not matter."""
    maker = scope.graph.producers.get(value)
    return maker is not None and scope.rules[maker].repeats(dim)
