"""Loops over microbatches in turn, where more is computed with the batch after a sum over all of it.

Sharpness-aware minimization takes its second gradient at weights that the first one moved, and the loss of an actor
reads the critic that was updated just before. Each gradient is a sum over the batch, and has a loop of its own:

    first turn     a loop whose sums the rest reads
    second turn    the rest: what it makes of those sums, once, then a loop that reads it, then the optimizer

A turn may compute again what an earlier one did: the forward pass of a loss with two factors that are sums over the
batch, or up to the statistics of batch normalization, as far as all turns compute no more than `AGAIN` says. Where no
sum but pieces of all microbatches are needed at once, as the embeddings of a contrastive loss are, the first turn joins
them, their gradients are computed once between the loops, and the second turn computes the forward pass again.

**Reference**: Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from passes.errors import PlanningError
from passes.ir import Graph, StatePairs, has_effect
from passes.layers import batch_inputs
from passes.rules import rules_of
from passes.transforms.batch_axis import BatchWalk, costly_beside_the_batch, is_picked
from passes.transforms.microbatch import Split, regions, split, walked
from passes.transforms.time_axis import Coupling

AGAIN = 1.0
"""The most that turns compute again, as a share of the step's flops. A forward pass is a third of a step, so a loss of
two factors takes 0.33; the statistics of one batch normalization after another take a turn for each sum, and more is
computed again by each: a network of many such layers would be a step many times over."""

MOST = 8
"""The most turns. Each is traced and planned as a loop of its own: with a batch normalization in each of 20 layers, a
search within a memory limit took more than four times as long as where such steps were refused."""


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
    in_stages: bool = False,
) -> tuple[Turn, ...]:
    """The turns of a graph in `count` microbatches of its batch: one if one loop computes all of it, as by `split`.

    Raises PlanningError as `split` does, if there are no turns either, or `in_stages`, which run one loop.
    """
    try:
        whole = split(graph, count, state_pairs=state_pairs, named=named, coupling=coupling)
    except PlanningError:
        stacked = batch_inputs(graph, state_pairs, named)
        rows = {graph.types[graph.inputs[i]].shape[0] for i in stacked}
        is_even = count > 1 and stacked and not any(n % count for n in rows)
        may_turn = is_even and coupling == "exact" and not in_stages
        turns = _cheapest(graph, count, stacked) if may_turn else ()
        if not turns:
            raise
        return turns
    nodes = tuple(range(len(graph.nodes)))
    return (Turn(nodes=nodes, inputs=graph.inputs, outputs=graph.outputs, split=whole, stacked=whole.batch),)


def _cheapest(graph: Graph, count: int, stacked: tuple[int, ...]) -> tuple[Turn, ...]:
    """The turns that compute least again, of those that wait for sums and those that join what the sums are made of;
    none where there are neither.
    """
    waiting = _Turns(graph, count, stacked, joins=False).all()
    joining = _Turns(graph, count, stacked, joins=True)
    joined = joining.all() if joining.work(waiting) != sum(joining.flops) else ()
    return min((turns for turns in (waiting, joined) if turns), key=joining.work, default=())


class _Turns:
    """The turns of a graph of which no single loop computes all, in `count` microbatches of the inputs `stacked`.

    A turn either waits for sums over the batch or `joins` the pieces that these are made of, without products.
    """

    def __init__(self, graph: Graph, count: int, stacked: tuple[int, ...], *, joins: bool) -> None:
        self.graph, self.count, self.stacked, self.joins = graph, count, stacked, joins
        self.batch = frozenset(graph.inputs[i] for i in stacked)
        self.flops = [rule.flops for rule in rules_of(graph)]

    def all(self) -> tuple[Turn, ...]:
        """The turns in their order; none where the rest of a turn would need what it computed."""
        turns: list[Turn] = []
        nodes = tuple(range(len(self.graph.nodes)))
        inputs, outputs = list(self.graph.inputs), self.graph.outputs
        if any(map(has_effect, self.graph.nodes)):
            return ()
        while True:
            if turns and (last := self._turn(nodes, inputs, outputs)) is not None:
                return (*turns, last) if self._is_in_loops((*turns, last)) else ()
            parted = self._parted(nodes, inputs, outputs)
            if parted is None:
                return ()
            (first, made), rest = parted
            turn = self._turn(first, inputs, made)
            if turn is None or len(rest) >= len(nodes) or len(turns) + 2 > MOST:
                return ()
            turns.append(turn)
            if self.work(turns) + sum(self.flops[i] for i in rest) > (1 + AGAIN) * sum(self.flops):
                return ()
            nodes = rest
            inputs += [v for v in made if v not in inputs]
            outputs = tuple(v for v in outputs if v not in made)

    def work(self, turns: Sequence[Turn]) -> float:
        """The flops of these turns."""
        return sum(self.flops[i] for turn in turns for i in turn.nodes)

    def _is_in_loops(self, turns: Sequence[Turn]) -> bool:
        """Whether loops over microbatches have at least half of the work: where pieces are joined, what is made of them
        is computed whole, as all of a network behind a batch normalization would be.
        """
        inside = sum(turn.split.flops * self.work([turn]) for turn in turns)
        return not self.joins or inside >= self.work(turns) / 2

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
        """((the nodes of the first turn, what they make), the nodes of the rest); None if nothing is waited for."""
        part, read = self._part(nodes, inputs, outputs)
        walk = walked(part, self.count, tuple(i for i, v in enumerate(read) if v in self.batch), "exact", waits=True)
        costly = costly_beside_the_batch(part, walk.rules, self.batch)
        made = _awaited(walk) or _joined(walk)
        if self.joins:
            made = _joined_for(walk, made)
        while True:
            first, (rest, early) = _closure(part, made), _after(walk, outputs, made, costly)
            shared = [v for v in early if any(not costly.isdisjoint(part.nodes[i].outputs) for i in first & early[v])]
            if not shared:
                break
            made = [*made, *shared]
        # What rows are picked of has a row for each of the batch, and would be there for all microbatches at once.
        if not made or any(is_picked(walk, v) for v in made):
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


def _joined(walk: BatchWalk) -> list[int]:
    """The pieces of the batch that an operator needs of all microbatches at once, and that are no inputs."""
    graph, joined = walk.graph, set[int]()
    for index in walk.later:
        values = graph.nodes[index].inputs
        if not any(graph.producers.get(v) in walk.later or walk.is_sum(v) for v in values):
            joined.update(v for v in values if v in walk.varying)
    return sorted(joined.difference(graph.inputs))


def _joined_for(walk: BatchWalk, values: Sequence[int]) -> list[int]:
    """The values that these are made of without products or loops, and that are no inputs: pieces, and sums."""
    graph, sources, pending = walk.graph, set[int](), list(values)
    seen = set(pending)
    while pending:
        value = pending.pop()
        index = graph.producers.get(value)
        if index is None or value not in walk.varying:
            continue
        if graph.nodes[index].subgraphs or not walk.rules[index].light:
            sources.add(value)
            continue
        fresh = set(graph.nodes[index].inputs) - seen
        seen |= fresh
        pending += fresh
    return sorted(sources)


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
