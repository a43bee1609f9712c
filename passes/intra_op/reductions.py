"""Partial sums in a sharding problem: which reader the plan reduces them for, and what the other readers pay.

The plan reduces a sum once, to the placement that its first reader needs, and reshards the reduced array for the others
(passes/placement/reshardings.py). So the edges of a sum stand in the order of the program, each with the seconds of
resharding from one placement that readers need to another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from passes.intra_op.assembly import Subproblem
from passes.ir import TensorType
from passes.sharding import Behind, Resharder, ShardingSpec
from passes.solver import Edge, Sums


class Read(NamedTuple):
    """The read of an edge: of a value of a subproblem, at node `at` or by an operator group; `behind` says what its
    resharding is hidden behind.
    """

    subproblem: Subproblem
    value: int
    at: int | None
    behind: Behind | None

    def first(self, target: int) -> int:
        """The first node that reads the value, where `target` does."""
        if self.at is not None:
            return self.at
        members = self.subproblem.grouping.operator_groups[target - self.subproblem.first].members
        consumers = self.subproblem.graph.consumers.get(self.value, ())
        return min((reader for reader in consumers if reader in members), default=0)


class _Known:
    """The sums by the identity of their edges' placements; the edges are kept, so that identities stay valid."""

    def __init__(self, _: Resharder) -> None:
        self.sums: dict[tuple[object, ...], tuple[Sequence[Edge], tuple[Sums, ...]]] = {}


def with_sums(edges: Sequence[Edge], reads: Sequence[Read], resharder: Resharder) -> tuple[Edge, ...]:
    """The edges; those of a sum with several readers are in the order of the program, and have their `Sums`."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, edge in enumerate(edges):
        numbers[edge.group].append(number)
    edges_in_order, known = list(edges), resharder.kept(_Known)
    for places in numbers.values():
        if len(places) == 1 or not any(_is_sum(origin) for origin in edges[places[0]].origins):
            continue
        read, first = reads[places[0]], {number: reads[number].first(edges[number].target) for number in places}
        in_order = [edges[number] for number in sorted(places, key=first.__getitem__)]
        type = read.subproblem.graph.types[read.value]
        key = (type, read.behind, *((id(edge.origins), id(edge.labels)) for edge in in_order))
        if key not in known.sums:
            known.sums[key] = in_order, _sums(in_order, type, read.behind, resharder)
        for number, edge, sums in zip(places, in_order, known.sums[key][1], strict=True):
            edges_in_order[number] = replace(edge, sums=sums)
    return tuple(edges_in_order)


def _is_sum(name: object) -> bool:
    return isinstance(name, ShardingSpec) and bool(name.partial)


def _sums(edges: Sequence[Edge], type: TensorType, behind: Behind | None, resharder: Resharder) -> tuple[Sums, ...]:
    labels = [label for edge in edges for label in edge.labels if isinstance(label, ShardingSpec)]
    number = {spec: n for n, spec in enumerate(dict.fromkeys(labels))}
    specs = tuple(number)
    ends = np.array([not spec.partial for spec in specs])
    onward = resharder.matrix(type, specs, specs, behind)
    return tuple(
        Sums(
            rows=np.array([_is_sum(origin) for origin in edge.origins]),
            names=np.array([number[label] for label in edge.labels if isinstance(label, ShardingSpec)]),
            ends=ends,
            onward=onward,
        )
        for edge in edges
    )
