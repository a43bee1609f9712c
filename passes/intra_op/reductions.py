"""Sums among the values of a sharding problem: which of their readers the plan reduces them for, and what others pay.

The plan reduces a sum once, to where the first node that reads it wants it, and moves the reduced array on
(passes/placement/reshardings.py). So the edges of a sum stand in the order of the program, with the seconds of going on
from one placement that its readers want to another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.ir import TensorType
from passes.sharding import Behind, Resharder, ShardingSpec
from passes.solver import Edge, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What an edge stands for: the array that is read, what its resharding is hidden behind, and the node that reads
    it first.
    """

    type: TensorType
    behind: Behind | None
    at: int


class _Known:
    """The sums of groups whose edges have the same placements; these are known by identity, so they are kept."""

    def __init__(self, _: Resharder) -> None:
        self.sums: dict[tuple[object, ...], tuple[Sequence[Edge], tuple[Sums, ...]]] = {}


def with_sums(edges: Sequence[Edge], reads: Sequence[Read], resharder: Resharder) -> tuple[Edge, ...]:
    """The edges, those of sums that several of them read in the order of the program and with their `Sums`."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, edge in enumerate(edges):
        numbers[edge.group].append(number)
    found, known = list(edges), resharder.kept(_Known)
    for places in numbers.values():
        if len(places) == 1 or not any(_is_sum(origin) for origin in edges[places[0]].origins):
            continue
        in_order = [edges[number] for number in sorted(places, key=lambda number: reads[number].at)]
        read = reads[places[0]]
        key = (read.type, read.behind, *((id(edge.origins), id(edge.labels)) for edge in in_order))
        if key not in known.sums:
            known.sums[key] = in_order, _sums(in_order, read, resharder)
        for number, edge, sums in zip(places, in_order, known.sums[key][1], strict=True):
            found[number] = replace(edge, sums=sums)
    return tuple(found)


def _is_sum(name: object) -> bool:
    return isinstance(name, ShardingSpec) and bool(name.partial)


def _sums(edges: Sequence[Edge], read: Read, resharder: Resharder) -> tuple[Sums, ...]:
    labels = [label for edge in edges for label in edge.labels if isinstance(label, ShardingSpec)]
    number = {spec: n for n, spec in enumerate(dict.fromkeys(labels))}
    specs = tuple(number)
    ends = np.array([not spec.partial for spec in specs])
    onward = resharder.matrix(read.type, specs, specs, read.behind)
    return tuple(
        Sums(
            rows=np.array([_is_sum(origin) for origin in edge.origins]),
            names=np.array([number[label] for label in edge.labels if isinstance(label, ShardingSpec)]),
            ends=ends,
            onward=onward,
        )
        for edge in edges
    )
