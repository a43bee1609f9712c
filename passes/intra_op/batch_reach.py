"""The dimensions and operators that the batch reaches, followed from the step's inputs through operators, loops and
branches.

Elements along a dimension of an operand go on along a dimension of a result where the operator's sharding rule has one
factor for both. Factors of an operator group that are cut together form one class. The places that the batch can reach
are dimensions of values, classes of factors, and dimensions of the ports of loops and branches.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from passes.intra_op.assembly import Subproblem
from passes.ir import Graph, PortUse
from passes.layers import split_for_loop


class _Dim(NamedTuple):
    """A dimension of a value of a subproblem."""

    subproblem: int
    value: int
    dim: int


class _Class(NamedTuple):
    """A class of factors of an operator group, by its node in the problem."""

    node: int
    cls: int


class _Port(NamedTuple):
    """A dimension of what a port of a loop or branch holds, by the subproblem and the node in it."""

    subproblem: int
    node: int
    port: int
    dim: int


_Place = _Dim | _Class | _Port

Classes = Mapping[int, frozenset[int]]
"""Classes of factors, by the node of their operator group."""


class BatchReach(NamedTuple):
    """The `classes` of operator groups that the batch reaches, and the `values`, as (`Subproblem.number`, value).

    For operator groups that it does not reach, `aligned` are the classes from which the batch is reached, those that
    such dimensions reach if no weights have them, and those of the batch's parts where a loop runs over it or it is
    split into fewer groups than there are devices.
    """

    classes: Classes
    aligned: Classes
    values: frozenset[tuple[int, int]]


def batch_reach(
    root: Subproblem, batch: Mapping[int, int], weights: Collection[int], stored: Collection[int], n_devices: int
) -> BatchReach:
    """The reach of the batch dimension of each of these inputs through the operators' factors.

    Values drawn at random for each row belong to the batch as well, such as the noise that a generator turns into
    images; so do rows for which a loop draws, and rows drawn from what is `stored` in the state, such as a replay
    memory.
    """
    place_graph = _PlaceGraph.through(root)
    weighty = place_graph.reached(_Dim(root.number, v, d) for v in weights for d in range(root.graph.types[v].rank))
    place_graph.add(itertools.chain.from_iterable(map(_moved, root.all())))
    reached = place_graph.reached(_Dim(root.number, value, dim) for value, dim in batch.items())
    # Of a batch in microbatches, rows are drawn for all of them before the loop.
    rows = {
        math.prod(root.graph.types[value].shape[first : dim + 1]) for value, dim in batch.items() for first in {0, dim}
    }
    of_rows = itertools.chain.from_iterable(_drawn(each, rows) for each in root.all())
    reached |= place_graph.apart_from(weighty, (*of_rows, *_drawn_from(root, stored, place_graph)))
    if (
        weights and not batch and not _classes_of(reached)
    ):  # all rows may be drawn, as points at which an equation shall hold
        every = (place for each in root.all() for place in _drawn(each) if not _extent(each, place) % n_devices)
        reached |= place_graph.apart_from(weighty, every)
    on_batch = _classes_of(reached)
    parts = itertools.chain.from_iterable(
        (*_inside_parts(each, reached), *_inside_groups(each, reached, n_devices)) for each in root.all()
    )
    behind = place_graph.back().reached(reached)
    # What only rows in another order lie along: the slots that tokens are sorted into, up to the gradients of experts.
    aligned = _classes_of(behind | place_graph.reached((*parts, *(behind - reached - weighty))))
    return BatchReach(
        classes=on_batch,
        aligned={node: classes for node, classes in aligned.items() if node not in on_batch},
        values=frozenset(place[:2] for place in reached if isinstance(place, _Dim)),
    )


def a_loop_runs_over(root: Subproblem, batch: Mapping[int, int]) -> bool:
    """Whether a loop runs over a dimension that these inputs, with the dimension of each, reach."""
    reached = _PlaceGraph.through(root).reached(_Dim(root.number, value, dim) for value, dim in batch.items())
    return any(True for each in root.all() for _ in _inside_parts(each, reached))


def _inside_parts(subproblem: Subproblem, reached: Collection[_Place]) -> Iterator[_Place]:
    """The first dimension of each part of the batch that a loop takes one after the other: only that is left
    to be cut.
    """
    number, graph = subproblem.number, subproblem.graph
    for index, control_join in subproblem.control_joins.items():
        for value, use in zip(graph.nodes[index].inputs, control_join.control.operands, strict=True):
            if use.stacked and graph.types[value].rank > 1 and _Dim(number, value, 0) in reached:
                yield _Port(number, index, use.port, 0)


def _inside_groups(subproblem: Subproblem, reached: Collection[_Place], n_devices: int) -> Iterator[_Place]:
    """The dimension with the rows of each group where a batch is split into a number of groups that the devices do not
    divide.
    """
    number, types = subproblem.number, subproblem.graph.types
    for node, rule in zip(subproblem.graph.nodes, subproblem.grouping.rules, strict=True):
        for before, after in rule.splits:
            groups, rows = types[node.outputs[0]].shape[0], types[node.outputs[0]].shape[after]
            if groups % n_devices and not rows % n_devices and _Dim(number, node.inputs[0], before) in reached:
                yield _Dim(number, node.outputs[0], after)


def _drawn(subproblem: Subproblem, rows: Collection[int] | None = None) -> Iterator[_Dim]:
    """The leading dimensions of values that are drawn at random and have one of these numbers of `rows`, by default
    any.
    """
    graph = subproblem.graph
    for node, rule in zip(graph.nodes, subproblem.grouping.rules, strict=True):
        if rule.draws:
            drawn = (v for v in node.outputs if graph.types[v].rank)
            ours = (value for value in drawn if rows is None or graph.types[value].shape[0] in rows)
            yield from (_Dim(subproblem.number, value, 0) for value in ours)


def _extent(subproblem: Subproblem, place: _Dim) -> int:
    """The number of elements along a dimension of a value."""
    return subproblem.graph.types[place.value].shape[place.dim]


def _drawn_from(root: Subproblem, stored: Collection[int], place_graph: _PlaceGraph) -> Iterator[_Place]:
    """The leading dimensions of what lookups take from `stored` inputs, or from what is made of them, at random
    indices.
    """
    drawn = place_graph.reached(itertools.chain.from_iterable(map(_drawn, root.all())))
    places = {_Dim(root.number, value, 0) for value in stored if root.graph.types[value].rank}
    tables = {place[:2] for place in place_graph.reached(places) if isinstance(place, _Dim)}
    for each in root.all() if drawn and tables else ():
        for node, rule in zip(each.graph.nodes, each.grouping.rules, strict=True):
            if rule.sparse and (each.number, node.inputs[0]) in tables:
                rows = (_Dim(each.number, value, 0) for value in node.outputs if each.graph.types[value].rank)
                yield from (place for place in rows if place in drawn)


def _classes_of(places: Iterable[_Place]) -> Classes:
    """The classes among places, by operator group node."""
    classes_of: dict[int, set[int]] = defaultdict(set)
    for place in places:
        if isinstance(place, _Class):
            classes_of[place.node].add(place.cls)
    return {node: frozenset(classes) for node, classes in classes_of.items()}


@dataclass(frozen=True, slots=True)
class _PlaceGraph:
    """A graph of places, with an edge to each place at which elements go on."""

    onward: dict[_Place, list[_Place]] = field(default_factory=lambda: defaultdict[_Place, list[_Place]](list))

    @classmethod
    def through(cls, root: Subproblem) -> _PlaceGraph:
        """The edges from operands to results along which elements keep their order."""
        place_graph = cls()
        place_graph.add(itertools.chain.from_iterable(map(_carried, root.all())))
        return place_graph

    def add(self, pairs: Iterable[tuple[_Place, _Place]]) -> None:
        """Adds an edge from the first place of each pair to the second."""
        for before, after in pairs:
            self.onward[before].append(after)

    def back(self) -> _PlaceGraph:
        """The same edges reversed, from results to operands."""
        place_graph = _PlaceGraph()
        place_graph.add((after, before) for before, several in self.onward.items() for after in several)
        return place_graph

    def apart_from(self, weights: Collection[_Place], starts: Iterable[_Place]) -> set[_Place]:
        """The places that can be reached from those starts that reach none of the `weights`: noise on weights does."""
        each = (self.reached([start]) for start in starts)
        return set[_Place]().union(*(places for places in each if places.isdisjoint(weights)))

    def reached(self, starts: Iterable[_Place]) -> set[_Place]:
        """The places that can be reached, the starts included."""
        reached = set(starts)
        pending = list(reached)
        while pending:
            more = [place for place in self.onward.get(pending.pop(), ()) if place not in reached]
            reached.update(more)
            pending += more
        return reached


def _carried(subproblem: Subproblem) -> Iterator[tuple[_Place, _Place]]:
    """The pairs of dimensions, of operands and results, that the operators of a subproblem carry elements along."""
    graph, grouping, number = subproblem.graph, subproblem.grouping, subproblem.number
    for index, node in enumerate(graph.nodes):
        rule, group_number = grouping.rules[index], grouping.operator_group_of(node)
        if index in subproblem.control_joins:
            yield from _through_ports(subproblem, index)
        elif rule.pinned:
            for a, before, b, after in rule.cut_alike(node, graph):
                yield _Dim(number, a, before), _Dim(number, b, after)
        elif rule.alias:
            for a, b in zip(node.inputs, node.outputs, strict=True):
                yield from ((_Dim(number, a, d), _Dim(number, b, d)) for d in range(graph.types[a].rank))
        elif group_number is not None:
            operator_group = grouping.operator_groups[group_number]
            at = subproblem.first + group_number
            for before, after in split_for_loop(graph, node, rule):
                yield _Dim(number, node.inputs[0], before), _Dim(number, node.outputs[0], after)
            classes = [_Class(at, operator_group.find(cls)) for cls in operator_group.factor_classes[index]]
            for value, factors in zip(node.inputs, rule.operands, strict=True):
                yield from ((_Dim(number, value, d), classes[f]) for d, f in enumerate(factors) if f >= 0)
            for value, factors in zip(node.outputs, rule.results, strict=True):
                yield from ((classes[f], _Dim(number, value, d)) for d, f in enumerate(factors) if f >= 0)


def _moved(subproblem: Subproblem) -> Iterator[tuple[_Place, _Place]]:
    """The pairs of dimensions, of operands and results, along which elements go on in another order or number."""
    grouping, number = subproblem.grouping, subproblem.number
    for index, (node, rule) in enumerate(zip(subproblem.graph.nodes, grouping.rules, strict=True)):
        group_number = grouping.operator_group_of(node)
        if not rule.moves or group_number is None:
            continue
        operator_group = grouping.operator_groups[group_number]
        at = subproblem.first + group_number
        for (operand, before, after), (value, factors) in itertools.product(
            rule.moves, list(zip(node.outputs, rule.results, strict=True))
        ):
            cls = operator_group.factor_classes[index][factors[after]] if factors[after] >= 0 else -1
            to = _Class(at, operator_group.find(cls)) if cls >= 0 else _Dim(number, value, after)
            yield _Dim(number, node.inputs[operand], before), to


def _through_ports(subproblem: Subproblem, index: int) -> Iterator[tuple[_Place, _Place]]:
    """The pairs of dimensions that a loop or branch carries elements along: of operands, ports, bodies' inputs, and
    results.
    """
    control_join, node, here = subproblem.control_joins[index], subproblem.graph.nodes[index], subproblem.number

    def hung(number: int, graph: Graph, value: int, port_use: PortUse) -> Iterator[tuple[_Place, _Place]]:
        """The dimensions of a value with those of the port that it hangs on."""
        for dim in range(int(port_use.stacked), graph.types[value].rank):
            yield _Dim(number, value, dim), _Port(here, index, port_use.port, dim - port_use.stacked)

    for value, port_use in zip(node.inputs, control_join.control.operands, strict=True):
        yield from hung(here, subproblem.graph, value, port_use)
    for body, inner in zip(control_join.control.bodies, control_join.bodies, strict=True):
        for value, port in zip(body.graph.outputs, body.outputs, strict=True):
            yield from hung(inner.number, body.graph, value, PortUse(port=port))
        for value, port in zip(body.graph.inputs, body.inputs, strict=True):
            yield from ((to, at) for at, to in hung(inner.number, body.graph, value, PortUse(port=port)))
    for value, port_use in zip(node.outputs, control_join.control.results, strict=True):
        yield from ((to, at) for at, to in hung(here, subproblem.graph, value, port_use))
