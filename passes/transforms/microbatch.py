"""Microbatches: a step computed a part of the batch at a time, or the operator that forbids it.

A microbatch is an index on a mesh axis in *time*, propagated by the same sharding rules as axes in space. Each value is
then cut along the axis, the same for every microbatch, or a sum of which every microbatch has a summand. Sums are added
up after the last microbatch, so the step is exactly the full batch's: constants such as 1/B stay as they are. A node
that uses such a sum otherwise couples the microbatches. If the sum comes from the batch alone (a count of tokens) it is
computed once, up front, on the whole batch; if it comes from parameters (batch normalisation) the meaning would change.

    before    once, on whole values: what no microbatch changes
    loop      once a microbatch
    after     once, from sums and joined pieces: the optimizer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from passes.errors import PlanningError, explain
from passes.ir import LOOP, Graph, StatePairs, control_of, has_effect, is_ordered, phase, scan_of
from passes.layers import OTHERWISE, batch_inputs, taken_for
from passes.placement import Placement, is_free
from passes.sharding import ShardingSpec, replicated
from passes.transforms.batch_axis import PICKED, RUNS_OVER, BatchWalk, location
from passes.transforms.batch_demand import sink
from passes.transforms.late_sums import made_of_sums, smallest
from passes.transforms.time_axis import AXIS, Coupling, Time


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A graph cut in time: node numbers of the three regions in order, and where the loop's nodes stand on the axis.

    `batch` are the positions of the inputs that are cut along dimension 0. `carried` are the values that leave the
    loop, each with its placement: partial ones are added up, the others joined along the dimension that is cut.
    `flops` is the share of the graph's work inside the loop.
    """

    count: int
    batch: tuple[int, ...]
    before: tuple[int, ...]
    loop: tuple[int, ...]
    after: tuple[int, ...]
    placements: Mapping[int, Placement]
    carried: tuple[tuple[int, ShardingSpec], ...]
    flops: float


def split(
    graph: Graph,
    count: int,
    *,
    state_pairs: StatePairs = (),
    named: Sequence[bool] = (),
    coupling: Coupling = "exact",
) -> Split:
    """The graph in `count` microbatches of its batch, which is the `named` inputs, else those that look like one.

    With `independent` coupling, each microbatch takes its own sum, times `count`, in place of a sum over the batch that
    it needs, and results are averaged.

    Raises PlanningError where there is no batch, `count` does not divide it, or an operator couples microbatches.
    """
    batch = batch_inputs(graph, state_pairs, named)
    if not batch:
        raise PlanningError(
            explain(
                f"microbatches={count}",
                "microbatches are cut from a batch: an array argument that is not state and has a leading dimension",
                "this function has none",
                f"leave out microbatches=, pass the batch as an argument, or {OTHERWISE}",
            )
        )
    uneven = [i for i in batch if graph.types[graph.inputs[i]].shape[0] % count]
    if uneven:
        extents = sorted({graph.types[graph.inputs[i]].shape[0] for i in uneven})
        raise PlanningError(
            explain(
                f"microbatches={count}",
                f"the number of microbatches must divide the batch, which is {' and '.join(map(str, extents))}",
                taken_for(graph, batch),
                f"write a divisor of it, pad the batch to a multiple of {count}, or {OTHERWISE}",
            )
        )
    return regions(walked(graph, count, batch, coupling), batch)


def sums_up_front(graph: Graph, count: int, batch: tuple[int, ...]) -> Split | None:
    """The split of a graph that computes sums over microbatches for the loop; None if the graph must be computed whole.

    `batch` are the positions of the inputs that are cut. Computed whole it would be right as well, but a reshape of
    (microbatches, rows) would join microbatches, which a device with a part of each microbatch's rows cannot do by
    itself.
    """
    if any(has_effect(node) or node.subgraphs for node in graph.nodes):
        return None
    try:
        early = regions(walked(graph, count, batch, "exact", waits=True), batch)
    except PlanningError:  # nothing of it is a microbatch's own
        return None
    return early if all(spec.partial for _, spec in early.carried) else None


def loops_over_rows(graph: Graph, count: int, batch: tuple[int, ...]) -> frozenset[int]:
    """The nodes that are the first loops over slices of the batch, which no microbatch can run."""
    if not batch or any(graph.types[graph.inputs[i]].shape[0] % count for i in batch):
        return frozenset()
    walk = walked(graph, count, batch, "independent", waits=True)
    loops = {id(refusal.node) for refusal in (*walk.refusals, *walk.delayed) if refusal.reason == RUNS_OVER}
    return frozenset(i for i, node in enumerate(graph.nodes) if id(node) in loops)


def loop_of(graph: Graph) -> int | None:
    """The node that is the first loop over microbatches, None for a graph that has none."""
    return next((i for i, n in enumerate(graph.nodes) if n.scope == LOOP and scan_of(n)), None)


def microbatch_stacks(graph: Graph) -> frozenset[int]:
    """The inputs that come as microbatches, stacked along dimension 0, of one loop over them or of several in turn."""
    stacks: set[int] = set()
    for node in graph.nodes:
        if node.scope == LOOP and (control := control_of(node, graph)) is not None:
            operands = zip(node.inputs, control.operands, strict=True)
            stacks.update(value for value, port_use in operands if port_use.stacked)
    return frozenset(stacks).intersection(graph.inputs)


def walked(graph: Graph, count: int, batch: tuple[int, ...], coupling: Coupling, *, waits: bool = False) -> BatchWalk:
    """The walk with the inputs at these positions cut; if it `waits`, nodes that use a sum come after the loop."""
    time = Time(count, single=any(graph.types[graph.inputs[position]].shape[0] == 1 for position in batch))
    rules = time.rules(graph)
    cut = {position: _cut(graph.types[graph.inputs[position]].rank, 0) for position in batch}
    inputs = [cut.get(i, replicated(graph.types[v].rank)) for i, v in enumerate(graph.inputs)]
    varying = {graph.inputs[i] for i in batch}
    up_front, at_once = frozenset[int](), frozenset[int]()
    while True:
        walk = BatchWalk(graph, time, rules, coupling, up_front, waits=waits, at_once=at_once)
        walk.run(inputs, varying)
        before_backward = _before_backward(walk) - at_once if count == 1 else frozenset[int]()
        if not walk.wanted_up_front - up_front and not before_backward:
            break
        up_front, at_once = up_front | walk.wanted_up_front, at_once | before_backward
    sink(walk)
    return walk


def regions(walk: BatchWalk, batch: tuple[int, ...]) -> Split:
    """The regions in which nodes are computed.

    Raises PlanningError if an operator couples microbatches, or nothing is cut.
    """
    graph, count = walk.graph, walk.time.count
    if _needs_the_batch_late(walk):
        raise PlanningError(_coupled(walk, batch))
    effects = [i for i, node in enumerate(graph.nodes) if has_effect(node)]
    _check_repeated(walk, effects, count)
    around = _AroundTheLoop(walk, effects)
    loop = _inside(walk, around)
    total = sum(rule.flops for rule in walk.rules.values()) or 1.0
    inside = sum(walk.rules[i].flops for i in loop)
    heavy = [i for i in loop if graph.nodes[i].inputs and not is_free(graph, i)]
    if not heavy or not around.carried:
        whole = [refusal.node for refusal in walk.refusals] or [graph.nodes[i] for i in sorted(walk.up_front)]
        raise PlanningError(
            explain(
                f"microbatches={count}",
                "a microbatch must be computed by itself, and this function needs its whole batch at once"
                + (f" ({location(whole[0])})" if whole else ""),
                taken_for(graph, batch),
                f"leave out microbatches=, or {OTHERWISE}",
            )
        )
    # What was computed for the loop is not computed again for what comes after it, but for what costs nothing.
    known = {i for i in around.up_front - walk.later if not is_free(graph, i)}
    after_loop = around.after - known
    _check_order(graph, [i for i in effects if i in around.up_front], [i for i in effects if i in after_loop], count)
    return Split(
        count=count,
        batch=batch,
        before=tuple(sorted(around.up_front)),
        loop=tuple(sorted(loop)),
        after=tuple(sorted(after_loop)),
        placements={i: walk.placements[i] for i in loop if i in walk.placements},
        carried=tuple(sorted(around.carried.items())),
        flops=inside / total,
    )


def _before_backward(walk: BatchWalk) -> frozenset[int]:
    """The nodes after the loop that a backward pass comes after, as the update of a critic whose actor is next."""
    graph, needed, nodes = walk.graph, set[int](), set[int]()
    for index in sorted(walk.later, reverse=True):
        node = graph.nodes[index]
        if phase(node) == "backward" or not needed.isdisjoint(node.outputs):
            nodes.add(index)
            needed.update(node.inputs)
    return frozenset(nodes)


def _needs_the_batch_late(walk: BatchWalk) -> bool:
    """Whether the backward pass has a node after the loop that reads pieces of the batch.

    A node that reads sums alone can wait for them, as the gradients of two factors do for that of their product.
    """
    of_pieces = {v for v in walk.varying if any(walk.home[v].dims)}
    for index in sorted(walk.later):
        node = walk.graph.nodes[index]
        if not of_pieces.isdisjoint(node.inputs):
            of_pieces.update(node.outputs)
            if node.outputs and phase(node) == "backward":
                return True
    return False


class _AroundTheLoop:
    """The nodes computed `up_front` and `after` the loop for outputs and effects; the values `carried` out of it."""

    def __init__(self, walk: BatchWalk, effects: Sequence[int]) -> None:
        self.walk, self.graph, self.smallest, self.of_sums = walk, walk.graph, smallest(walk), made_of_sums(walk)
        self.after: set[int] = set()
        self.carried: dict[int, ShardingSpec] = {}
        self.up_front: set[int] = set()
        self.need_after(self.graph.outputs)
        for index in effects:
            if index not in walk.up_front:
                self.after.add(index)
                self.need_after(self.graph.nodes[index].inputs)

    def need_up_front(self, value: int) -> None:
        """Adds the nodes that a value is made of to those before the loop."""
        pending = [value]
        while pending:
            node = self.graph.producers.get(pending.pop())
            if node is not None and node not in self.up_front:
                self.up_front.add(node)
                pending.extend(self.graph.nodes[node].inputs)

    def need_after(self, values: Iterable[int]) -> None:
        """Adds the nodes that values are made of to those after the loop, up to results of the loop."""
        walk, pending = self.walk, list(values)
        while pending:
            value = pending.pop()
            node = self.graph.producers.get(value)
            if node is None or node in self.after:
                continue
            if node in walk.up_front:
                self.need_up_front(value)
            elif (value in walk.varying or node in walk.loops) and node not in walk.later and not self._waits(node):
                self.carried[value] = walk.leaving(value)
            else:
                self.after.add(node)
                pending.extend(self.graph.nodes[node].inputs)

    def _waits(self, index: int) -> bool:
        """Whether a node only makes of sums over microbatches what can be made of them once, after the loop.

        It adds a value that does not vary, as the gradient of a penalty on weights is added to that of the loss: in the
        loop the first microbatch would add it. Or it puts sums into larger arrays, as the gradients of layers into that
        of their stack. In the loop, devices' own sums would be reduced in every microbatch for either. Or it goes on
        with the gradient of what is computed once, before the loop.
        """
        if index in self.of_sums:
            return True
        walk, node = self.walk, self.graph.nodes[index]
        placement = walk.placements.get(index)
        if placement is None or index in walk.loops or walk.rules[index].alias:
            return False
        readers = {reader for value in node.outputs for reader in self.graph.consumers.get(value, ())}
        if not readers - walk.later <= self.after:
            return False
        are_sums = walk.rules[index].adds and all(spec.partial for spec in placement.operands)
        adds_unchanged = are_sums and not walk.varying.issuperset(node.inputs)
        return adds_unchanged or not self.smallest.keys().isdisjoint(node.outputs)


def _inside(walk: BatchWalk, around: _AroundTheLoop) -> set[int]:
    """The nodes of the loop: those that make what leaves it. Their other operands are made up front."""
    graph, loop, live = walk.graph, set[int](), set(around.carried)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if live.isdisjoint(node.outputs):
            continue
        if is_free(graph, index):
            loop.add(index)
        elif index in walk.placements:
            loop.add(index)
            live.update(node.inputs)
    loop |= _reordered(walk, loop, live)
    for value in live:
        producer = graph.producers.get(value)
        if producer is not None and producer not in loop and not is_free(graph, producer):
            around.need_up_front(value)
    return loop


def _reordered(walk: BatchWalk, loop: set[int], live: set[int]) -> set[int]:
    """The nodes that only permute dimensions for a reader inside the loop, such as a tied weight's transpose, though
    they do not vary.

    They cost nothing there, and made up front, two values would be gathered in place of one that stays sharded.
    """
    return {
        index
        for index, node in enumerate(walk.graph.nodes)
        if index not in loop and walk.rules[index].permutes
        if node.inputs[0] in live and not live.isdisjoint(node.outputs)
    }


def _check_repeated(walk: BatchWalk, effects: Sequence[int], count: int) -> None:
    """Raises PlanningError for an effect that every microbatch would have."""
    for index in effects:
        if index in walk.placements and index not in walk.later:
            node = walk.graph.nodes[index]
            raise PlanningError(
                explain(
                    f"microbatches={count} of a step with {location(node)}",
                    "a callback runs once a step, on whole operands; this one is in what every microbatch computes",
                    "",
                    "move it out of the loop that it is in, or leave out microbatches=",
                )
            )


def _check_order(graph: Graph, before: Sequence[int], after: Sequence[int], count: int) -> None:
    """Raises PlanningError for ordered effects that microbatches would bring out of order."""
    early, late = ([i for i in side if is_ordered(graph.nodes[i])] for side in (before, after))
    if early and late and max(early) > min(late):
        first, second = (location(graph.nodes[i]) for i in (min(late), max(early)))
        raise PlanningError(
            explain(
                f"microbatches={count} of a step with ordered callbacks, {first} and then {second}",
                "microbatches need the results of the second, and the first reports what they make",
                "",
                "drop ordered=True, change their order, or leave out microbatches=",
            )
        )


def _coupled(walk: BatchWalk, batch: Sequence[int]) -> str:
    refusal = (walk.refusals or walk.delayed)[0]
    is_one = walk.time.count == 1
    remedy = "plan without stages" if is_one else "leave out microbatches=, in a pipeline write microbatches=1"
    if refusal.reason == PICKED:
        remedy += ", or pick the rows before the step and pass them beside the others"
    elif walk.coupling == "exact":
        remedy += (
            ', or accept other numbers with microbatch_semantics="independent": each microbatch then takes its own '
            "statistics"
        )
    return explain(
        f"microbatches={walk.time.count} of a batch that {location(refusal.node)} needs as a whole",
        f"microbatches add up to the full step only where each is computed by itself; here {refusal.reason}",
        taken_for(walk.graph, batch),
        f"{remedy}; if that is not the batch, {OTHERWISE}",
    )


def _cut(rank: int, dim: int) -> ShardingSpec:
    return ShardingSpec(dims=tuple((AXIS,) if d == dim else () for d in range(rank)))
