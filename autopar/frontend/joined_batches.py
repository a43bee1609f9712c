"""Batches that a step joins one behind the other, and takes apart again: the places where another order of rows costs
no device the rows of others.

Preference optimization sends chosen and rejected answers through one network, self-supervised learning several views
of an image, semi-supervised learning labelled images with others. Joined one behind the other, the rows of one device
are not those that it has of each batch. Joined in *groups*, of each batch a part after the other, they are: a group of
the result is made of the same group of every batch. All that computes row by row, or adds up rows, takes them in any
order; where the place of a row matters, they are put into the program's order before.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.frontend.places import Part, Parts, by_place, parts_of
from passes.ir import Control, Graph, Node, StatePairs, control_of
from passes.layers import Dims, Numbered, batch_inputs
from passes.rules import ShardingRule, rules_of

WORTH = 2
"""The bytes of joins and parts that every byte put into another order must save.

A join or part of rows that lie on other devices moves most of them; so does another order of rows. What is less than
twice as much is left as it is written: the saving is not sure, as other dimensions may be cut."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the elements along a dimension that is joined of pieces of these `sizes`: in each of so many `groups`
    an equal part of every piece.
    """

    groups: int
    sizes: tuple[int, ...]


Orders = Mapping[int, Order]
"""The order along each dimension that is not in the program's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """The change of one node: dimensions `along` which it joins batches or takes them apart in `groups`, each with the
    number of its parts; the `operands` that it reads in the program's order, and the `results` that it makes in that.
    """

    along: Mapping[int, int] = field(default_factory=dict[int, int])
    is_join: bool = False
    groups: int = 1
    operands: Mapping[int, Orders] = field(default_factory=dict[int, Orders])
    results: Mapping[int, Orders] = field(default_factory=dict[int, Orders])


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes of a program: of nodes, of the bodies of nodes, of `values` that come in the program's order, and of
    outputs, by position, that leave in it.
    """

    nodes: Mapping[int, NodeChange]
    bodies: Mapping[tuple[int, int], Changes]
    values: Mapping[int, Orders]
    outputs: Mapping[int, Orders]

    @property
    def is_none(self) -> bool:
        return not (self.nodes or self.values or self.outputs or any(not c.is_none for c in self.bodies.values()))


def joined_batches(graph: Graph, state_pairs: StatePairs = (), named: Sequence[bool] = ()) -> Changes | None:
    """The changes after which joined batches are in groups, as many as the batch's sizes have in common; None where no
    batches are joined, or more would be put into another order than is saved.
    """
    batch = [graph.inputs[i] for i in batch_inputs(graph, state_pairs, named)]
    groups = math.gcd(*(graph.types[value].shape[0] for value in batch)) if batch else 1
    if groups == 1 or not _may_join(graph, groups):
        return None
    dims = Dims(multiple=groups)
    top = dims.enter(graph)
    program = _Program(groups=groups, dims=dims, scopes=tuple(_scopes(graph, top)))
    program.settle({dims.root(top.firsts[value]) for value in batch})
    return program.changes(0) if program.weights else None


def _may_join(graph: Graph, groups: int) -> bool:
    """Whether a program joins several arrays along a dimension of which each has a multiple of so many elements."""
    for node in graph.nodes:
        for whole in parts_of(graph, node, groups):
            if (
                whole.is_join
                and len(whole.parts) > 1
                and not any(part.extent % (groups * part.scale) for part in whole.parts)
            ):
                return True
    return any(_may_join(body, groups) for node in graph.nodes for body in node.subgraphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """A graph of the program, the numbers of its dimensions, how often it runs, and the scope of each body."""

    graph: Graph
    numbered: Numbered
    rules: tuple[ShardingRule, ...]
    times: int
    controls: Mapping[int, Control]
    bodies: Mapping[tuple[int, int], int]


def _scopes(graph: Graph, numbered: Numbered, times: int = 1, number: int = 0) -> list[_Scope]:
    """The scope of a graph that is the `number`-th, and those of the bodies in it."""
    controls = {i: control_of(graph.nodes[i], graph) for i in numbered.bodies}
    known = {i: control for i, control in controls.items() if control is not None}
    inner: list[_Scope] = []
    bodies: dict[tuple[int, int], int] = {}
    for i, control in known.items():
        for which, (body, inside) in enumerate(zip(control.bodies, numbered.bodies[i], strict=True)):
            bodies[i, which] = number + 1 + len(inner)
            inner += _scopes(body.graph, inside, times * body.trips, bodies[i, which])
    rules = rules_of(graph)
    return [_Scope(graph=graph, numbered=numbered, rules=rules, times=times, controls=known, bodies=bodies), *inner]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A dimension of an operand or result of a node that it reads or makes in the program's order, and whether putting
    it into another order may send it between devices.
    """

    is_result: bool
    position: int
    value: int
    dim: int
    is_sent: bool


@dataclass(slots=True, kw_only=True)
class _Program:
    """The orders of a program's classes of dimensions: `weights` are the sizes of a class's pieces, without what they
    have in common; classes that are `banned` stay as they are written.
    """

    groups: int
    dims: Dims
    scopes: tuple[_Scope, ...]
    weights: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    banned: set[int] = field(default_factory=set[int])

    def settle(self, batch: set[int]) -> None:
        """Finds the classes that are joined of pieces of the `batch`, until all that are left are worth it."""
        while True:
            self.weights = {}
            while self._learn(batch):
                pass
            bad = self._uneven() or self._not_worth()
            if not bad:
                return
            self.banned |= bad

    def _learn(self, batch: set[int]) -> bool:
        """Whether there is a new class, joined of pieces of the batch or of other classes."""
        news = [self._joined(scope, node, batch) for scope in self.scopes for node in scope.graph.nodes]
        return any(news)

    def root(self, scope: _Scope, value: int, dim: int) -> int:
        """The class of a dimension."""
        return self.dims.root(scope.numbered.firsts[value] + dim)

    def pieces(self, scope: _Scope, value: int, dim: int) -> tuple[int, ...] | None:
        """The sizes of the pieces that a dimension is joined of; None where they are no multiples of the groups."""
        extent = scope.graph.types[value].shape[dim]
        weights = self.weights.get(self.root(scope, value, dim), (1,))
        unit, rest = divmod(extent, sum(weights))
        return None if rest or any(unit * w % self.groups for w in weights) else tuple(unit * w for w in weights)

    def orders(self, scope: _Scope, value: int) -> dict[int, Order]:
        """The order along each dimension of a value that is joined of several pieces."""
        orders: dict[int, Order] = {}
        for dim in range(scope.graph.types[value].rank) if self.weights else ():
            if self.root(scope, value, dim) in self.weights:
                orders[dim] = Order(self.groups, self.pieces(scope, value, dim) or ())
        return orders

    def _joined(self, scope: _Scope, node: Node, batch: set[int]) -> bool:
        """Whether a node says of a new class of what it is joined."""
        is_new = False
        for whole in parts_of(scope.graph, node, self.groups):
            if whole.is_join and len(whole.parts) > 1:
                pieces = [self._pieces_of(scope, part) for part in whole.parts]
                roots = {self.root(scope, part.value, part.dim) for part in whole.parts}
                if all(pieces) and not roots.isdisjoint(batch.union(self.weights)):
                    root = self.root(scope, whole.value, whole.dim)
                    is_new |= self._know(root, tuple(itertools.chain.from_iterable(pieces)))
            else:
                for part in whole.parts:
                    between = self._between(scope, whole, part)
                    if len(between) > 1 and not any(n % part.scale for n in between):
                        is_new |= self._know(self.root(scope, part.value, part.dim), between)
        return is_new

    def _know(self, root: int, pieces: tuple[int, ...]) -> bool:
        """Whether it is new that a class is joined of these pieces."""
        if root in self.weights or root in self.banned:
            return False
        common = math.gcd(*pieces)
        self.weights[root] = tuple(piece // common for piece in pieces)
        return True

    def _pieces_of(self, scope: _Scope, part: Part) -> tuple[int, ...]:
        """The sizes of the pieces that a part is joined of, in elements of the whole; none where they are no multiples
        of the groups.
        """
        return tuple(n * part.scale for n in self.pieces(scope, part.value, part.dim) or ())

    def _between(self, scope: _Scope, whole: Parts, part: Part) -> tuple[int, ...]:
        """The sizes of the pieces of a joined dimension that make a part of it; empty where those are no whole ones."""
        is_joined = self.root(scope, whole.value, whole.dim) in self.weights
        pieces = (self.pieces(scope, whole.value, whole.dim) if is_joined else None) or ()
        ends = [0, *itertools.accumulate(pieces)]
        if part.begin not in ends or part.begin + part.extent not in ends:
            return ()
        return pieces[ends.index(part.begin) : ends.index(part.begin + part.extent)]

    def _in_groups(self, scope: _Scope, node: Node) -> list[Parts]:
        """The dimensions along which a node joins whole pieces, or takes them apart, each in its own class's order."""
        return [
            whole
            for whole in parts_of(scope.graph, node, self.groups)
            if all((b := self._between(scope, whole, p)) and b == self._pieces_of(scope, p) for p in whole.parts)
        ]

    def _uneven(self) -> set[int]:
        """The classes with a dimension that cannot be divided as the pieces are."""
        bad: set[int] = set()
        for scope in self.scopes:
            for value, type in enumerate(scope.graph.types):
                for dim in range(type.rank):
                    root = self.root(scope, value, dim)
                    if root in self.weights and self.pieces(scope, value, dim) is None:
                        bad.add(root)
        return bad

    def _not_worth(self) -> set[int]:
        """The classes of which more would be put into another order than is saved by joins and parts in groups."""
        saved: dict[int, float] = defaultdict(float)
        moved: dict[int, float] = defaultdict(float)
        for number, scope in enumerate(self.scopes):
            graph = scope.graph
            nbytes = [type.nbytes * scope.times for type in graph.types]
            for index, node in enumerate(graph.nodes):
                for whole in self._in_groups(scope, node):
                    saved[self.root(scope, whole.value, whole.dim)] += nbytes[whole.value]
                for placed in self._placed(scope, index):
                    root = self.root(scope, placed.value, placed.dim)
                    moved[root] += nbytes[placed.value] * placed.is_sent
            around = (*graph.inputs, *graph.outputs) if number == 0 else ()
            for value in (*graph.constants, *around):
                for dim in self.orders(scope, value):
                    moved[self.root(scope, value, dim)] += nbytes[value]
        return {root for root in self.weights if WORTH * moved[root] > saved[root]}

    def _placed(self, scope: _Scope, index: int) -> Iterator[_Placed]:
        """The dimensions along which a node reads or makes values in the program's order.

        What a node takes whole along a dimension is on every device, and so are positions and random numbers.
        """
        node, rule = scope.graph.nodes[index], scope.rules[index]
        in_groups = {(w.value, w.dim) for w in self._in_groups(scope, node)}
        in_groups |= {(part.value, part.dim) for w in self._in_groups(scope, node) for part in w.parts}
        if index in scope.controls:
            control = scope.controls[index]
            for is_result, values, uses in (
                (False, node.inputs, control.operands),
                (True, node.outputs, control.results),
            ):
                for position, (value, use) in enumerate(zip(values, uses, strict=True)):
                    if use.stacked and 0 in self.orders(scope, value):
                        yield _Placed(is_result, position, value, 0, is_sent=False)
            return
        placed_by = by_place(node, rule)
        is_made = rule.draws or not node.inputs
        for is_result, side, values in ((False, rule.operands, node.inputs), (True, rule.results, node.outputs)):
            for position, (factors, value) in enumerate(zip(side, values, strict=True)):
                for dim, order in self.orders(scope, value).items() if not rule.alias else ():
                    factor = factors[dim]
                    is_class = factor >= 0 and not rule.factors[factor].size % self.groups
                    is_whole = factor < 0 or (is_made and len(set(order.sizes)) == 1)
                    if (value, dim) not in in_groups and not (is_class and factor not in placed_by):
                        yield _Placed(is_result, position, value, dim, is_sent=not is_whole)

    def changes(self, number: int) -> Changes:
        """The changes of a scope and of the bodies in it."""
        scope = self.scopes[number]
        graph = scope.graph
        nodes: dict[int, NodeChange] = {}
        for index, node in enumerate(graph.nodes):
            sides: tuple[dict[int, dict[int, Order]], ...] = ({}, {})
            for placed in self._placed(scope, index):
                if placed.is_result or not self._is_same(scope, placed.value, placed.dim):
                    orders = sides[placed.is_result].setdefault(placed.position, {})
                    orders[placed.dim] = self.orders(scope, placed.value)[placed.dim]
            in_groups = self._in_groups(scope, node)
            if in_groups or any(sides):
                operands, results = sides
                nodes[index] = NodeChange(
                    along={whole.dim: len(whole.parts) for whole in in_groups},
                    is_join=any(whole.is_join for whole in in_groups),
                    groups=self.groups,
                    operands=operands,
                    results=results,
                )
        entering = (*graph.constants, *(graph.inputs if number == 0 else ()))
        leaving = graph.outputs if number == 0 else ()
        return Changes(
            nodes=nodes,
            bodies={place: self.changes(inner) for place, inner in scope.bodies.items()},
            values={value: orders for value in entering if (orders := self.orders(scope, value))},
            outputs={i: orders for i, value in enumerate(leaving) if (orders := self.orders(scope, value))},
        )

    def _is_same(self, scope: _Scope, value: int, dim: int) -> bool:
        """Whether all elements of a value along a dimension are the same, so that it has them in any order."""
        maker = scope.graph.producers.get(value)
        return maker is not None and scope.rules[maker].repeats(dim)
