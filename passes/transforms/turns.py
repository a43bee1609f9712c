"""Loops over microbatches in turn, where more is computed with the batch after a sum over all of it.

Sharpness-aware minimization takes its second gradient at weights that the first one moved, and the loss of an actor
reads the critic that was updated just before. Each gradient is a sum over the batch, and has a loop of its own:

    first turn     a loop whose sums the rest reads
    second turn    the rest: what it makes of those sums, once, then a loop that reads it, then the optimizer

A turn computes again what is cheap, as a cast of the batch. Where it would compute products with the batch again, as
batch normalization does, whose statistics are sums of what it normalizes, there are no turns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from passes.errors import PlanningError
from passes.ir import Graph, StatePairs, has_effect
from passes.layers import batch_inputs
from passes.transforms.batch_axis import BatchWalk, costly_beside_the_batch, is_picked
from passes.transforms.microbatch import Split, regions, split, walked
from passes.transforms.time_axis import Coupling


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A part of a step with one loop over microbatches: its nodes, and the values that it reads and makes.

    `split` numbers the nodes and inputs of the turn, in their order here. `stacked` are the positions of the inputs of
    the whole step that come in microbatches, the same for each turn.
    """

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    split: Split
    stacked: tuple[int, ...]


def in_turn(
    graph: Graph,
    count: int,
    *,
    state_pairs: StatePairs = (),
    named: Sequence[bool] = (),
    coupling: Coupling = "exact",
) -> tuple[Turn, ...]:
    """The turns of a graph in `count` microbatches of its batch: one if one loop computes all of it, as by `split`.

    Raises PlanningError as `split` does, if there are no turns either.
    """
    try:
        whole = split(graph, count, state_pairs=state_pairs, named=named, coupling=coupling)
    except PlanningError:
        stacked = batch_inputs(graph, state_pairs, named)
        rows = {graph.types[graph.inputs[i]].shape[0] for i in stacked}
        is_even = count > 1 and stacked and not any(n % count for n in rows)
        turns = _Turns(graph, count, stacked).all() if is_even and coupling == "exact" else ()
        if not turns:
            raise
        return turns
    nodes = tuple(range(len(graph.nodes)))
    return (Turn(nodes=nodes, inputs=graph.inputs, outputs=graph.outputs, split=whole, stacked=whole.batch),)


class _Turns:
    """The turns of a graph of which no single loop computes all, in `count` microbatches of the inputs `stacked`."""

    def __init__(self, graph: Graph, count: int, stacked: tuple[int, ...]) -> None:
        self.graph, self.count, self.stacked = graph, count, stacked
        self.batch = frozenset(graph.inputs[i] for i in stacked)

    def all(self) -> tuple[Turn, ...]:
        """The turns in their order; none where the rest of a turn would need what it computed."""
        turns: list[Turn] = []
        nodes = tuple(range(len(self.graph.nodes)))
        inputs, outputs = list(self.graph.inputs), self.graph.outputs
        if any(map(has_effect, self.graph.nodes)):
            return ()
        while True:
            if turns and (last := self._turn(nodes, inputs, outputs)) is not None:
                return (*turns, last)
            parted = self._parted(nodes, inputs, outputs)
            if parted is None:
                return ()
            (first, made), rest = parted
            turn = self._turn(first, inputs, made)
            if turn is None or len(rest) >= len(nodes):
                return ()
            turns.append(turn)
            nodes = rest
            inputs += [v for v in made if v not in inputs]
            outputs = tuple(v for v in outputs if v not in made)

    def _turn(self, nodes: tuple[int, ...], inputs: Sequence[int], outputs: Sequence[int]) -> Turn | None:
        """These nodes in one loop; None where that is not possible."""
        part, read = self._part(nodes, inputs, outputs)
        batch = tuple(i for i, value in enumerate(read) if value in self.batch)
        try:
            whole = regions(walked(part, self.count, batch, "exact"), batch) if batch else None
        except PlanningError:  # what needs a sum over the batch is left for another turn
            return None
        if whole is None:
            return None
        return Turn(nodes=nodes, inputs=read, outputs=tuple(outputs), split=whole, stacked=self.stacked)

    def _part(
        self, nodes: tuple[int, ...], inputs: Sequence[int], outputs: Sequence[int]
    ) -> tuple[Graph, tuple[int, ...]]:
        """(the graph of these nodes alone, those of the inputs that it reads)."""
        used = {value for i in nodes for value in self.graph.nodes[i].inputs}.union(outputs)
        read = tuple(value for value in inputs if value in used)
        return self.graph.part(nodes, read, outputs), read

    def _parted(
        self, nodes: tuple[int, ...], inputs: Sequence[int], outputs: Sequence[int]
    ) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] | None:
        """((the nodes of the first turn, what they make), the nodes of the rest); None if both would compute products
        with the batch.
        """
        part, read = self._part(nodes, inputs, outputs)
        walk = walked(part, self.count, tuple(i for i, v in enumerate(read) if v in self.batch), "exact", waits=True)
        costly = costly_beside_the_batch(part, walk.rules, self.batch)
        made = _awaited(walk)
        while True:
            first, (rest, early) = _closure(part, made), _after(walk, outputs, made, costly)
            shared = [v for v in early if any(not costly.isdisjoint(part.nodes[i].outputs) for i in first & early[v])]
            if not shared:
                break
            made = [*made, *shared]
        # What rows are picked of has a row for each of the batch, and would be there for all microbatches at once.
        if (
            not made
            or any(is_picked(walk, v) for v in made)
            or any(not costly.isdisjoint(part.nodes[i].outputs) for i in first & rest)
        ):
            return None
        return (tuple(nodes[i] for i in sorted(first)), tuple(made)), tuple(nodes[i] for i in sorted(rest))


def _awaited(walk: BatchWalk) -> list[int]:
    """The sums over the batch that nodes which read pieces of it wait for."""
    graph, reading, pending = walk.graph, set[int](), list[int]()
    pieces = {v for v in walk.varying if any(walk.home[v].dims)}
    for index in sorted(walk.later):
        if not pieces.isdisjoint(graph.nodes[index].inputs):
            pending += graph.nodes[index].inputs
    sums: dict[int, None] = {}
    while pending:
        value = pending.pop()
        index = graph.producers.get(value)
        if walk.is_sum(value):
            sums[value] = None
        elif index in walk.later and index not in reading:
            reading.add(index)
            pending += graph.nodes[index].inputs
    return sorted(sums)


def _after(
    walk: BatchWalk, values: Sequence[int], made: Collection[int], costly: Collection[int]
) -> tuple[set[int], dict[int, set[int]]]:
    """(the nodes that make values of what was `made` in a first turn, what of them that turn could make as well: sums
    over the batch and results of the step, each with all nodes that it is made of).
    """
    graph, nodes, pending = walk.graph, set[int](), [v for v in values if v not in made]
    early: dict[int, set[int]] = {}
    while pending:
        value = pending.pop()
        index = graph.producers.get(value)
        if index is None or value in made:
            continue
        is_unchanged = value not in walk.varying and value in costly
        if index not in walk.later and value not in early and (walk.is_sum(value) or value in values or is_unchanged):
            early[value] = _closure(graph, [value])
        if index not in nodes:
            nodes.add(index)
            pending += graph.nodes[index].inputs
    return nodes, early


def _closure(graph: Graph, values: Collection[int]) -> set[int]:
    """The nodes that values are made of."""
    nodes, pending = set[int](), list(values)
    while pending:
        index = graph.producers.get(pending.pop())
        if index is not None and index not in nodes:
            nodes.add(index)
            pending.extend(graph.nodes[index].inputs)
    return nodes
