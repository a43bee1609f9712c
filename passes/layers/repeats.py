"""The equal blocks of a forward pass, by the first operator of each.

A model's layers apply the same operators in the same order, so that the sequence of operators and types has a period. A
block begins where the fewest bytes cross. An encoder and a decoder, or the towers of two inputs, repeat blocks of their
own: each is a stretch. Blocks found here look equal; whether they are, with their backward pass and their updates,
`passes.pipeline.structural_hash` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.errors import PlanningError
from passes.ir import Graph
from passes.layers.cuts import Weigh, crossing_nbytes, even_cuts, part_flops, work
from passes.layers.even_ranges import even_ranges
from passes.layers.forward import forward_nodes

FEWEST = 3
"""The fewest equal blocks that are a repetition: two may be an encoder and a decoder, or two halves by chance."""

COVERED = 0.5
"""The share of the forward pass's work that blocks must hold to be cut there: less, and most of it would lie in the
first and last stage with what stands around the blocks. With all of it asked for, no blocks are found, and stages are
0.18 % slower for 1.13 of the work (`python -m benchmarks.settings`)."""

NEAR_MOST = 0.9
"""The share of the most work of any repeating stretch from which another is as good: a stretch of twice the period
repeats as well but may hold a block less, and the shortest period is the one that is meant.
"""

RARE = 256
"""Operators that occur more often say little about the period, and comparing each with all others takes the square of
their number; the deepest model of `benchmarks.planning growth` has 192 blocks."""

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """A forward pass in parts: the first node of each part (`firsts`), the part of each block, and the first block of
    each layer.

    A part stands for several blocks if some were left out of a sample. `even[n]` has the first block of each of n
    stages, as `stage_cuts` makes them.
    """

    firsts: tuple[int, ...]
    blocks: tuple[int, ...]
    layers: tuple[int, ...]
    even: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


def in_blocks(
    body: Graph, n_layers: int, left_out: Sequence[int] = (), also: Sequence[int] = (), weigh: Weigh = part_flops
) -> Cuts:
    """The forward pass in blocks, and the blocks in `n_layers` layers of even work, by default in flops.

    In a sample, of each stretch of equal blocks so many of `left_out` are missing after the second; `also` are other
    numbers of stages to cut it into. Raises PlanningError where there are too few places to cut into layers.
    """
    nodes = forward_nodes(body)
    repeated = stretches(body, 0.0 if any(left_out) else COVERED)
    inner = sorted({first for stretch in repeated for first in stretch if first > nodes[0]})
    firsts = (0, *inner)  # what precedes is on every stage
    if len(firsts) + sum(left_out) < n_layers:
        return _uneven(body, n_layers, also, weigh)
    missing = {firsts.index(stretch[1]): count for stretch, count in zip(repeated, left_out, strict=False)}
    order = [block for block in range(len(firsts)) for _ in range(1 + missing.get(block, 0))]
    weights = weigh(body, firsts)[order].tolist()
    evenly = {n: tuple(first for first, _ in even_ranges(weights, n)) for n in {n_layers, *also} if n <= len(order)}
    return Cuts(firsts=firsts, blocks=tuple(order), layers=evenly[n_layers], even=evenly)


def _uneven(body: Graph, n_layers: int, also: Sequence[int], weigh: Weigh) -> Cuts:
    """The layers and even stages of a forward pass that does not repeat itself often enough."""
    evenly = {n_layers: even_cuts(body, n_layers, weigh=weigh)}
    for n_stages in also:
        if n_stages < n_layers:
            with suppress(PlanningError):  # it cannot be cut into so many
                evenly[n_stages] = stage_cuts(body, n_stages, weigh=weigh)
    firsts = sorted(set(itertools.chain.from_iterable(evenly.values())))
    number = {first: block for block, first in enumerate(firsts)}
    numbered = {n: tuple(number[first] for first in begins) for n, begins in evenly.items()}
    return Cuts(firsts=tuple(firsts), blocks=tuple(range(len(firsts))), layers=numbered[n_layers], even=numbered)


def most_layers(body: Graph, at_most: int, left_out: Sequence[int] = (), weigh: Weigh = part_flops) -> int:
    """The number of layers that a forward pass can be cut into, at most `at_most`; 1 where it cannot be cut."""
    for n_layers in range(at_most, 1, -1):
        with suppress(PlanningError):
            return len(in_blocks(body, n_layers, left_out, weigh=weigh).layers)
    return 1


def stage_cuts(body: Graph, n_stages: int, pattern: str = "", weigh: Weigh = part_flops) -> tuple[int, ...]:
    """The first body node of each of `n_stages` stages, between equal blocks where a model has enough of them.

    Otherwise, or with a `pattern` of module names, they are those of `even_cuts`, which raises PlanningError where
    there are too few.
    """
    if pattern or n_stages == 1:
        return even_cuts(body, n_stages, pattern, weigh)
    cuts = in_blocks(body, n_stages, weigh=weigh)
    return tuple(cuts.firsts[cuts.blocks[block]] for block in cuts.layers)


def stretches(body: Graph, covered: float = COVERED) -> tuple[tuple[int, ...], ...]:
    """The first body node of each block of a stretch, and of what follows the last, for every stretch of equal blocks.

    Stretches with less work than one block of the largest are none; nor are any that hold less than the share `covered`
    of the work together.
    """
    nodes = forward_nodes(body)
    flops = np.concatenate([[0.0], np.cumsum(work(body, nodes))])
    words, crossing = _words(body, nodes), crossing_nbytes(body, nodes)
    cuts = _stretches(words, flops, crossing, 0, len(nodes), 0.0)
    if sum(flops[each[-1]] - flops[each[0]] for each in cuts) < covered * flops[-1]:
        return ()
    return tuple(tuple(nodes[cut] for cut in each if cut < len(nodes)) for each in cuts)


def _stretches(words: Numbers, flops: Floats, crossing: Floats, begin: int, end: int, least: float) -> list[range]:
    """The places where blocks begin and end in each stretch between two nodes with more work than `least`, in order."""
    stretch = _run(words[begin:end], flops[begin : end + 1])
    if stretch is None:
        return []
    first, last, period = begin + stretch[0], begin + stretch[1], stretch[2]

    def order(start: int) -> tuple[float, int]:
        return float(crossing[start + period]), -_count(start, last, period)

    start = min(range(first, min(first + period, last - period + 1)), key=order)
    cuts = range(start, last + 1, period)
    total = flops[cuts[-1]] - flops[start]
    if len(cuts) - 1 < FEWEST or total <= least:
        return []
    least = least or total / (len(cuts) - 1)
    before = _stretches(words, flops, crossing, begin, start, least)
    return [*before, cuts, *_stretches(words, flops, crossing, cuts[-1], end, least)]


def _count(begin: int, end: int, period: int) -> int:
    """The number of whole blocks in a stretch of nodes."""
    return (end - begin) // period


def _words(body: Graph, nodes: Sequence[int]) -> Numbers:
    """A number for every node, equal for equal operators on equal types."""
    numbers: dict[object, int] = {}
    words: list[int] = []
    for index in nodes:
        node = body.nodes[index]
        types = (body.types[value] for value in (*node.inputs, *node.outputs))
        words.append(numbers.setdefault((node.primitive, *types), len(numbers)))
    return np.array(words, dtype=np.int64)


def _run(words: Numbers, flops: Floats) -> tuple[int, int, int] | None:
    """The repeating stretch (begin, end, period) with the most work; of near equals, the shortest period."""
    stretches = [(*_longest(words[:-period] == words[period:]), period) for period in _periods(words)]
    work_of = {
        (begin, end + period, period): flops[begin + _count(begin, end + period, period) * period] - flops[begin]
        for begin, end, period in stretches
        if end - begin >= (FEWEST - 1) * period
    }
    most_work = max(work_of.values(), default=0.0)
    best = [stretch for stretch, covered in work_of.items() if covered >= NEAR_MOST * most_work]
    return min(best, key=lambda stretch: stretch[2], default=None)


def _periods(words: Numbers) -> list[int]:
    """Distances at which rare operators occur again."""
    numbers, counts = np.unique(words, return_counts=True)
    rare = numbers[(counts >= FEWEST) & (counts <= RARE)]
    places = (np.flatnonzero(words == number) for number in rare)
    distances = [np.unique(at[1:] - at[0]) for at in places]
    every = np.unique(np.concatenate(distances)) if distances else np.zeros(0, dtype=np.int64)
    return [int(distance) for distance in every if distance <= len(words) // FEWEST]


def _longest(equal: NDArray[np.bool_]) -> tuple[int, int]:
    """The ends [begin, end) of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return 0, 0
    at = int(np.argmax(ends - begins))
    return int(begins[at]), int(ends[at])
