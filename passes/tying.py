"""Structurally equal nodes of a sharding problem made one: a model's layers are solved once, however many there are.

Reference: design/intra_op.md 3.3; Weisfeiler and Lehman's colour refinement.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from passes.sharding_problem import Budget, Edge, Floats, ShardingProblem


def tie(problem: ShardingProblem, radius: int, parts: int = 1) -> tuple[ShardingProblem, tuple[int, ...]]:
    """The problem with structurally equal nodes made one, and the class of every node.

    Large classes are cut into `parts` of consecutive nodes, for budgets that one choice for all would meet badly.

    Nodes are equal if their kinds, their costs and their neighbourhoods up to `radius` edges are (Weisfeiler-Lehman
    colours). The kind matters: a matrix and its transpose cost the same and want opposite placements. The answer is a
    feasible answer of the whole problem; that it is also optimal is measured (tests), not proven.

    Reference: design/intra_op.md 3.3.
    """
    keys = _edge_keys(problem.edges)
    colours = _parted(_colours(problem, keys, radius), parts)
    first: dict[str, int] = {}
    classes = tuple(first.setdefault(colour, len(first)) for colour in colours)
    seconds: list[Floats] = [np.zeros(0)] * len(first)
    for cls, own in zip(classes, problem.seconds, strict=True):
        seconds[cls] = own.copy() if not seconds[cls].size else seconds[cls] + own
    groups: dict[int, list[tuple[Edge, str]]] = defaultdict(list)
    for edge, key in zip(problem.edges, keys, strict=True):
        groups[edge.group].append((edge, key))
    merged: dict[tuple[tuple[int, int, str], ...], tuple[list[Edge], float]] = {}
    numbers: dict[tuple[tuple[int, int, str], ...], int] = {}
    places: dict[int, int] = {}
    for group, edges in groups.items():
        unique: dict[tuple[int, int, str], Edge] = {}
        for edge, content in edges:
            key = (classes[edge.source], classes[edge.target], content)
            unique.setdefault(key, replace(edge, source=key[0], target=key[1]))
        signature = tuple(sorted(unique))
        members, weight = merged.get(signature, (list(unique.values()), 0.0))
        merged[signature] = (members, weight + edges[0][0].weight)
        places[group] = numbers.setdefault(signature, len(numbers))
    tied: list[Edge] = []
    for group, (edges, weight) in enumerate(merged.values()):
        tied.extend(replace(edge, group=group, weight=weight) for edge in edges)
    budgets = tuple(_tied_budget(budget, classes, places) for budget in problem.budgets)
    return ShardingProblem(seconds=tuple(seconds), edges=tuple(tied), budgets=budgets), classes


def _tied_budget(budget: Budget, classes: Sequence[int], places: Mapping[int, int]) -> Budget:
    """A budget of a tied problem: a class holds what all of its nodes do."""
    nbytes: dict[int, Floats] = {}
    for node, own in budget.nbytes.items():
        held = nbytes.get(classes[node])
        nbytes[classes[node]] = own if held is None else held + own
    copies: dict[int, dict[object, float]] = defaultdict(dict)
    for group, own in budget.copies.items():
        if group in places:
            held = copies[places[group]]
            for label, size in own.items():
                held[label] = held.get(label, 0.0) + size
    return Budget(nbytes=nbytes, copies=copies, limit=budget.limit)


def _parted(colours: Sequence[str], parts: int) -> list[str]:
    """Colours of which each has been made `parts` colours, by the order of its nodes."""
    if parts == 1:
        return list(colours)
    sizes: dict[str, int] = defaultdict(int)
    for colour in colours:
        sizes[colour] += 1
    seen: dict[str, int] = defaultdict(int)
    parted: list[str] = []
    for colour in colours:
        parted.append(f"{colour}/{seen[colour] * parts // sizes[colour]}")
        seen[colour] += 1
    return parted


def _colours(problem: ShardingProblem, keys: Sequence[str], radius: int) -> list[str]:
    kinds = problem.kinds or ("",) * len(problem.seconds)
    colours = [_digest(own.tobytes() + kind.encode()) for own, kind in zip(problem.seconds, kinds, strict=True)]
    around: list[list[tuple[str, int]]] = [[] for _ in colours]
    for edge, key in zip(problem.edges, keys, strict=True):
        around[edge.source].append((f"to {key}", edge.target))
        around[edge.target].append((f"from {key}", edge.source))
    for _ in range(radius):
        colours = [
            _digest((colour + "".join(sorted(key + colours[other] for key, other in near))).encode())
            for colour, near in zip(colours, around, strict=True)
        ]
    return colours


def _edge_keys(edges: Sequence[Edge]) -> list[str]:
    """The content of every edge; edges mostly share their arrays, which are then read once."""
    known: dict[tuple[float, ...], str] = {}
    keys: list[str] = []
    for edge in edges:
        same = (id(edge.before), id(edge.after), id(edge.seconds), id(edge.origins), id(edge.labels), edge.weight)
        if same not in known:
            names = (f"{edge.weight} {edge.origins!r}".encode(), repr(edge.labels).encode())
            parts = (edge.before.tobytes(), edge.after.tobytes(), edge.seconds.tobytes(), *names)
            known[same] = _digest(b"|".join(parts))
        keys.append(known[same])
    return keys


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()
