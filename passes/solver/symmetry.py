"""Symmetry: structurally equal nodes of a sharding problem merged, so that a model's equal layers are solved once.

Reference: the colour refinement of Weisfeiler and Leman (1968).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.solver.problem import Budget, Edge, Floats, ShardingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedProblem:
    """A smaller problem, whose answers give equal nodes of the whole problem equal strategies.

    `classes` [nodes of the whole] and `edges` [edges of the whole] are its nodes and edges: one stands for many.
    `alike` [edges of the smaller] numbers edges by what they are and what they are between, wherever that stands.
    """

    problem: ShardingProblem
    classes: tuple[int, ...]
    edges: tuple[int, ...]
    alike: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether no nodes were merged: a proof for the smaller problem then holds for the whole."""
        return len(self.problem.seconds) == len(self.classes)


def merge_equal_nodes(problem: ShardingProblem, radius: int | None, parts: int = 1) -> MergedProblem:
    """The problem with structurally equal nodes merged; without a `radius` none are.

    Large classes are cut into `parts` of consecutive nodes, for budgets that one choice for all would meet badly.

    Nodes are equal if their kinds, their costs and their neighbourhoods up to `radius` edges are (Weisfeiler-Lehman
    colours). The kind matters: a matrix and its transpose cost the same and want opposite placements. The answer is a
    feasible answer of the whole problem and mostly a good one; its optimum bounds nothing, since equal layers may be
    better off with different strategies. A bound of the whole is `lower_bound.lifted`.
    """
    keys = _edge_keys(problem.edges)
    apart = radius is None
    colours = list(range(len(problem.seconds))) if apart else _parted(_colours(problem, keys, radius), parts)
    first: dict[int, int] = {}
    classes = tuple(first.setdefault(colour, len(first)) for colour in colours)
    seconds: list[Floats] = [np.zeros(0)] * len(first)
    for cls, node_seconds in zip(classes, problem.seconds, strict=True):
        seconds[cls] = node_seconds.copy() if not seconds[cls].size else seconds[cls] + node_seconds
    groups: dict[int, dict[tuple[int, int, int], Edge]] = defaultdict(dict)
    for edge, key in zip(problem.edges, keys, strict=True):
        groups[edge.group].setdefault((classes[edge.source], classes[edge.target], key), edge)
    numbers: dict[tuple[tuple[int, int, int], ...], int] = {}
    places = {group: numbers.setdefault(tuple(sorted(edges)), len(numbers)) for group, edges in groups.items()}
    weights, merged_edges = [0.0] * len(numbers), dict[int, dict[tuple[int, int, int], Edge]]()
    for group, edges in groups.items():
        weights[places[group]] += next(iter(edges.values())).weight
        merged_edges.setdefault(places[group], edges)
    keys_of = {(place, *content): number for number, (place, content) in enumerate(_contents(merged_edges))}
    ends = [(classes[e.source], classes[e.target], key) for e, key in zip(problem.edges, keys, strict=True)]
    mapped = tuple(keys_of[places[e.group], *content] for e, content in zip(problem.edges, ends, strict=True))
    near_colours = colours if apart else _colours(problem, keys, 1)
    member = {cls: node for node, cls in enumerate(classes)}
    known: dict[tuple[int, int, int], int] = {}
    contents = ((near_colours[member[s]], near_colours[member[t]], key) for _, (s, t, key) in _contents(merged_edges))
    alike = tuple(known.setdefault(content, len(known)) for content in contents)
    merged = tuple(
        replace(edge, source=source, target=target, group=place, weight=weights[place])
        for place, edges in merged_edges.items()
        for (source, target, _), edge in edges.items()
    )
    budgets = tuple(_merged_budget(budget, classes, places) for budget in problem.budgets)
    smaller = ShardingProblem(seconds=tuple(seconds), edges=merged, budgets=budgets, cache=problem.cache)
    return MergedProblem(problem=smaller, classes=classes, edges=mapped, alike=alike)


def _contents(kept: Mapping[int, Mapping[tuple[int, int, int], Edge]]) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """The edges of a merged problem in order: their groups, and the nodes they join."""
    return ((place, content) for place, edges in kept.items() for content in edges)


def _merged_budget(budget: Budget, classes: Sequence[int], places: Mapping[int, int]) -> Budget:
    """A budget of a merged problem, in which a class holds what all of its nodes hold."""
    nbytes: dict[int, Floats] = {}
    for node, node_nbytes in budget.nbytes.items():
        nbytes_so_far = nbytes.get(classes[node])
        nbytes[classes[node]] = node_nbytes if nbytes_so_far is None else nbytes_so_far + node_nbytes
    copies: dict[int, dict[object, float]] = defaultdict(dict)
    for group, node_nbytes in budget.copies.items():
        if group in places:
            copied = copies[places[group]]
            for label, size in node_nbytes.items():
                copied[label] = copied.get(label, 0.0) + size
    return Budget(nbytes=nbytes, copies=copies, limit=budget.limit)


def _parted(colours: Sequence[int], parts: int) -> list[int]:
    """Colours of which each has been made `parts` colours, by the order of its nodes."""
    if parts == 1:
        return list(colours)
    sizes, occurrences = Counter(colours), Counter[int]()
    parted: list[int] = []
    for colour in colours:
        parted.append(colour * parts + occurrences[colour] * parts // sizes[colour])
        occurrences[colour] += 1
    return parted


def _colours(problem: ShardingProblem, keys: Sequence[int], radius: int) -> list[int]:
    """A number for every node, equal for nodes that are equal up to `radius` edges."""
    kinds = problem.kinds or ("",) * len(problem.seconds)
    numbers: dict[object, int] = {}
    contents = ((seconds.tobytes(), kind) for seconds, kind in zip(problem.seconds, kinds, strict=True))
    colours = [numbers.setdefault(content, len(numbers)) for content in contents]
    around: list[list[tuple[int, int]]] = [[] for _ in colours]
    for edge, key in zip(problem.edges, keys, strict=True):
        around[edge.source].append((2 * key, edge.target))
        around[edge.target].append((2 * key + 1, edge.source))
    for _ in range(radius):
        numbers = {}
        signatures = (
            (c, *sorted((key, colours[n]) for key, n in neighbours))
            for c, neighbours in zip(colours, around, strict=True)
        )
        colours = [numbers.setdefault(content, len(numbers)) for content in signatures]
    return colours


def _edge_keys(edges: Sequence[Edge]) -> list[int]:
    """A number for the content of every edge; edges mostly share their arrays, which are then read once."""
    content_numbers: dict[tuple[float, ...], int] = {}
    numbers: dict[tuple[object, ...], int] = {}
    keys: list[int] = []
    for edge in edges:
        parts = (edge.before, edge.after, edge.seconds, edge.origins, edge.labels, edge.sums)
        same = (*map(id, parts), edge.weight)
        if same not in content_numbers:
            arrays = (edge.before.tobytes(), edge.after.tobytes(), edge.seconds.tobytes(), edge.sums and edge.sums.key)
            content_numbers[same] = numbers.setdefault((*arrays, edge.origins, edge.labels, edge.weight), len(numbers))
        keys.append(content_numbers[same])
    return keys
