"""The batch axis in time: a step computed a microbatch at a time, or the operator that forbids it.

A microbatch is a mesh axis in *time*, propagated by the same sharding rules as axes in space. Each value is then cut
along the axis, the same for every microbatch, or a sum of which every microbatch holds a summand. Sums are added up
after the last microbatch, so the step is exactly the full batch's: constants such as 1/B stay as they are. What uses a
sum otherwise couples the microbatches. If it comes from the batch alone (a count of tokens) it is computed once, up
front, on the whole batch; if it comes from parameters (batch normalisation) the meaning would change.

    before    once, on whole values: what no microbatch changes
    loop      once a microbatch
    after     once, from sums and joined pieces: the optimizer

Reference: design/compiler.md section 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.control import Body, Control, control_of
from passes.effects import has_effect, is_ordered
from passes.errors import PlanningError, explain
from passes.ir import Graph, Node
from passes.moves import Layout, Placement, is_free
from passes.phases import LOOP, phase
from passes.resharding import Step
from passes.rules import ShardingRule, rule_of
from passes.sharding import ShardingSpec, replicated

AXIS = "microbatch"

Coupling = Literal["exact", "independent"]


@dataclass(frozen=True, slots=True)
class Time:
    """The one axis in time, as a mesh: what a value's `local_shape` on it is, is its shape in one microbatch."""

    count: int

    @property
    def axes(self) -> tuple[str, ...]:
        return (AXIS,)

    def axis_size(self, axis: str) -> int:
        return self.count

    def steps(self, type: object, before: ShardingSpec, after: ShardingSpec) -> tuple[Step, ...]:
        """The one step from a placement in time to another; `analyse` asks for no other than these."""
        if before.partial:
            return (Step(kind="all_reduce", axes=(AXIS,)),)
        if after.partial:
            return (Step(kind="keep", axes=(AXIS,)),)
        (cut,) = (d for d, axes in enumerate(after.dims) if axes)
        return (Step(kind="slice", axes=(AXIS,), to_dim=cut),)


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


def split(graph: Graph, count: int, *, tied: Sequence[tuple[int, int]] = (), coupling: Coupling = "exact") -> Split:
    """The graph in `count` microbatches of the inputs that look like a batch and whose cutting keeps its meaning.

    Inputs that `tied` pairs name are state. Of the others, those that share the extent of dimension 0 are tried
    together; the most work inside the loop wins. With `independent` coupling, a sum over the batch that a microbatch
    needs is taken to be its own sum times `count`, and what comes of it is averaged.

    Raises PlanningError where there is no batch, `count` does not divide it, or an operator couples microbatches.
    """
    state = {i for _, i in tied}
    groups: dict[int, list[int]] = {}
    for position, value in enumerate(graph.inputs):
        shape = graph.types[value].shape
        if position not in state and shape and graph.types[value].size and graph.consumers.get(value):
            groups.setdefault(shape[0], []).append(position)
    if not groups:
        raise PlanningError(
            explain(
                f"microbatches={count}",
                "microbatches are cut from a batch: an array argument that is not state and has a leading dimension",
                "this function has none",
                "leave out microbatches=, or pass the batch as an argument",
            )
        )
    fitting = {extent: positions for extent, positions in groups.items() if extent % count == 0}
    if not fitting:
        extents = " or ".join(
            f"{extent} ({graph.input_names[positions[0]] if graph.input_names else f'input {positions[0]}'})"
            for extent, positions in groups.items()
        )
        raise PlanningError(
            explain(
                f"microbatches={count}",
                f"the number of microbatches must divide the batch, which is {extents}",
                "",
                f"write a divisor of it, or pad the batch to a multiple of {count}",
            )
        )
    found: list[Split] = []
    refused: list[PlanningError] = []
    for positions in sorted(fitting.values(), key=max, reverse=True):  # a batch comes after the state, as a rule
        walk = _walked(graph, count, tuple(positions), coupling)
        try:
            found.append(_regions(walk, tuple(positions)))
        except PlanningError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return max(found, key=lambda one: one.flops)


def sums_up_front(graph: Graph, count: int, batch: tuple[int, ...]) -> Split | None:
    """What a graph computes for the loop, as sums over microbatches; None if it has to be computed whole.

    `batch` are the positions of the inputs that are cut. Whole is right as well, but puts microbatches together by a
    reshape of (microbatches, rows), which no device that has a part of each microbatch's rows can do by itself.
    """
    if any(has_effect(node) or node.subgraphs for node in graph.nodes):
        return None
    try:
        found = _regions(_walked(graph, count, batch, "exact", waits=True), batch)
    except PlanningError:  # nothing of it is a microbatch's own
        return None
    return found if all(spec.partial for _, spec in found.carried) else None


def whole_layout(graph: Graph) -> Layout:
    """Everything whole, bodies of loops and branches included."""

    def whole(values: Iterable[int]) -> tuple[ShardingSpec, ...]:
        return tuple(replicated(graph.types[v].rank) for v in values)

    return Layout(
        inputs=whole(graph.inputs),
        placements=tuple(_whole(node, graph) for node in graph.nodes),
        outputs=whole(graph.outputs),
    )


def loop_of(graph: Graph) -> int | None:
    """The node that is the loop over microbatches, None for a graph that has none."""
    return next((i for i, n in enumerate(graph.nodes) if n.primitive == "scan" and n.scope == LOOP), None)


def microbatch_stacks(graph: Graph) -> frozenset[int]:
    """The inputs that come as microbatches, stacked along dimension 0."""
    index = loop_of(graph)
    control = None if index is None else control_of(graph.nodes[index], graph)
    if index is None or control is None:
        return frozenset()
    operands = zip(graph.nodes[index].inputs, control.operands, strict=True)
    return frozenset(value for value, wire in operands if wire.stacked) & frozenset(graph.inputs)


def _whole(node: Node, graph: Graph) -> Placement:
    return Placement(
        operands=tuple(replicated(graph.types[v].rank) for v in node.inputs),
        results=tuple(replicated(graph.types[v].rank) for v in node.outputs),
        bodies=tuple(map(whole_layout, node.subgraphs)) if control_of(node, graph) else (),
    )


def _walked(graph: Graph, count: int, batch: tuple[int, ...], coupling: Coupling, *, waits: bool = False) -> _Walk:
    """Where everything stands in time if these inputs are cut; what uses a sum comes after the loop if it `waits`."""
    rules = {i: rule_of(node, graph) for i, node in enumerate(graph.nodes)}
    cut = {position: _cut(graph.types[graph.inputs[position]].rank, 0) for position in batch}
    inputs = [cut.get(i, replicated(graph.types[v].rank)) for i, v in enumerate(graph.inputs)]
    varying = {graph.inputs[i] for i in batch}
    up_front: frozenset[int] = frozenset()
    while True:
        walk = _Walk(graph, Time(count), rules, coupling, up_front, waits=waits)
        walk.start(inputs, varying)
        walk.run()
        if not walk.wanted_up_front - up_front:
            break
        up_front |= walk.wanted_up_front
    walk.sink()
    return walk


def _regions(walk: _Walk, batch: tuple[int, ...]) -> Split:
    """What to compute where. Raises PlanningError if an operator couples microbatches, or nothing is cut."""
    graph, count = walk.graph, walk.time.count
    late = [i for i in walk.later if phase(graph.nodes[i]) == "backward" and not _only_reports(graph.nodes[i])]
    if late:
        raise PlanningError(_coupled(walk, count))
    effects = [i for i, node in enumerate(graph.nodes) if has_effect(node)]
    _check_repeated(walk, effects, count)
    after: set[int] = set()
    carried: dict[int, ShardingSpec] = {}
    up_front: set[int] = set()

    def need_up_front(value: int) -> None:
        pending = [value]
        while pending:
            node = graph.producers.get(pending.pop())
            if node is not None and node not in up_front:
                up_front.add(node)
                pending.extend(graph.nodes[node].inputs)

    def need_after(values: Iterable[int]) -> None:
        pending = list(values)
        while pending:
            value = pending.pop()
            node = graph.producers.get(value)
            if node is None or node in after:
                continue
            if node in walk.up_front:
                need_up_front(value)
            elif (value in walk.varying or node in walk.loops) and node not in walk.later:
                carried[value] = walk.leaving(value)
            else:
                after.add(node)
                pending.extend(graph.nodes[node].inputs)

    need_after(graph.outputs)
    for index in effects:
        if index not in walk.up_front:
            after.add(index)
            need_after(graph.nodes[index].inputs)
    loop: set[int] = set()
    live = set(carried)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if is_free(graph, index):
            if not live.isdisjoint(node.outputs):
                loop.add(index)
        elif index in walk.placements and not live.isdisjoint(node.outputs):
            loop.add(index)
            live.update(node.inputs)
    for value in live:
        made = graph.producers.get(value)
        if made is not None and made not in loop and not is_free(graph, made):
            need_up_front(value)
    total = sum(rule.flops for rule in walk.rules.values()) or 1.0
    inside = sum(walk.rules[i].flops for i in loop)
    heavy = [i for i in loop if graph.nodes[i].inputs and not is_free(graph, i)]
    if not heavy or not carried:
        raise PlanningError(
            explain(
                f"microbatches={count}",
                "a microbatch must be computed by itself, and this function needs its whole batch at once",
                str(walk.refusals[0]) if walk.refusals else "",
                "leave out microbatches=",
            )
        )
    # What was computed for the loop is not computed again for what comes after it.
    again = {i for i in after if i in up_front and i not in walk.later}
    _check_order(graph, [i for i in effects if i in up_front], [i for i in effects if i in after - again], count)
    return Split(
        count=count,
        batch=batch,
        before=tuple(sorted(up_front)),
        loop=tuple(sorted(loop)),
        after=tuple(sorted(after - again)),
        placements={i: walk.placements[i] for i in loop if i in walk.placements},
        carried=tuple(sorted(carried.items())),
        flops=inside / total,
    )


def _only_reports(node: Node) -> bool:
    """Whether a node makes nothing that others wait for, and can run when all microbatches are done."""
    return not node.outputs


def _check_repeated(walk: _Walk, effects: Sequence[int], count: int) -> None:
    """Raises PlanningError for an effect that every microbatch would have."""
    for index in effects:
        if index in walk.placements and index not in walk.later:
            node = walk.graph.nodes[index]
            raise PlanningError(
                explain(
                    f"microbatches={count} of a step with {_Refusal(node=node, words='')}",
                    "a callback runs once a step, on whole operands; this one is in what every microbatch computes",
                    "",
                    "move it out of the loop that it is in, or leave out microbatches=",
                )
            )


def _check_order(graph: Graph, before: Sequence[int], after: Sequence[int], count: int) -> None:
    """Raises PlanningError for ordered effects that microbatches would bring out of order."""
    early, late = ([i for i in side if is_ordered(graph.nodes[i])] for side in (before, after))
    if early and late and max(early) > min(late):
        first, second = (_Refusal(node=graph.nodes[i], words="") for i in (min(late), max(early)))
        raise PlanningError(
            explain(
                f"microbatches={count} of a step with ordered callbacks, {first} and then {second}",
                "microbatches need the results of the second, and the first reports what they make",
                "",
                "drop ordered=True, change their order, or leave out microbatches=",
            )
        )


def _coupled(walk: _Walk, count: int) -> str:
    refusal = walk.refusals[0]
    return explain(
        f"microbatches={count} of a batch that {refusal} needs as a whole",
        f"microbatches add up to the full step only where each is computed by itself; here {refusal.words}",
        "",
        'leave out microbatches=, or accept other numbers with microbatch_semantics="independent": each microbatch '
        "then takes its own statistics",
    )


def _cut(rank: int, dim: int) -> ShardingSpec:
    return ShardingSpec(dims=tuple((AXIS,) if d == dim else () for d in range(rank)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """A node that needs its whole batch at once, and why."""

    node: Node
    words: str

    def __str__(self) -> str:
        where = " at ".join(filter(None, (self.node.primitive, self.node.source)))
        return where + (f" ({self.node.scope})" if self.node.scope else "")


class _Walk:
    """Placements in time, node by node. `varying` values differ between microbatches; `later` nodes need all of them.

    What a barrier or a loop makes `beside` them differs not, and is had in the loop alone: weights that enter the
    barrier of a recomputed layer with its activations are not to bring the whole forward pass before the loop.

    Inside a loop or branch of the user's there is no before and no after: a node that needs all microbatches fails.
    """

    def __init__(
        self,
        graph: Graph,
        time: Time,
        rules: Mapping[int, ShardingRule],
        coupling: Coupling,
        up_front: frozenset[int] = frozenset(),
        inside: bool = False,
        waits: bool = False,
    ) -> None:
        self.graph, self.time, self.rules, self.inside, self.waits = graph, time, rules, inside, waits
        self.coupling: Coupling = coupling
        self.up_front = up_front
        self.wanted_up_front: set[int] = set()
        self.home: dict[int, ShardingSpec] = {}
        self.varying: set[int] = set()
        self.beside: set[int] = set()  # made beside what varies, by a barrier or loop, and what comes of that alone
        self.tainted: set[int] = set()  # values that come from more than the batch
        self.free: set[int] = set()
        self.later: set[int] = set()
        self.late_values: set[int] = set()
        self.placements: dict[int, Placement] = {}
        self.refusals: list[_Refusal] = []
        self.loops: dict[int, _Loop] = {}
        self.outputs: tuple[ShardingSpec, ...] = ()
        self.wanted: dict[int, set[ShardingSpec]] = {}  # where values that microbatches do not change are read

    def start(self, inputs: Sequence[ShardingSpec], varying: set[int]) -> None:
        self.home = dict(zip(self.graph.inputs, inputs, strict=True))
        self.home |= {v: replicated(self.graph.types[v].rank) for v in self.graph.constants}
        self.varying = set(varying)
        self.tainted = {v for v in self.graph.inputs if v not in varying}

    def run(self) -> None:
        for index in range(len(self.graph.nodes)):
            self._visit(index)

    def _visit(self, index: int) -> None:
        graph, node = self.graph, self.graph.nodes[index]
        if is_free(graph, index):
            self.free.update(node.outputs)
            return
        if any(v in self.tainted for v in node.inputs):
            self.tainted.update(node.outputs)
        if any(v in self.late_values for v in node.inputs):
            self._postpone(index, None)
            return
        if index in self.up_front or not any(v in self.varying for v in node.inputs):
            self.home.update((v, replicated(graph.types[v].rank)) for v in node.outputs)
            beside = index not in self.up_front and not self.beside.isdisjoint(node.inputs)
            if self.inside or beside:
                self.placements[index] = _whole(node, graph)
            if beside:
                self.beside.update(node.outputs)
            return
        found = self._place(index)
        if isinstance(found, Placement):
            self.placements[index] = found
            self.home.update(zip(node.outputs, found.results, strict=True))
            self.varying.update(self._varying_results(index))
            self.beside.update(v for v in node.outputs if v not in self.varying)
            return
        repaired = not self.inside and (_only_reports(node) or self._ask_up_front(node))
        self._postpone(index, None if repaired else found)

    def _varying_results(self, index: int) -> Iterable[int]:
        """What a node makes of the batch; some results of a loop or barrier have nothing to do with it."""
        node = self.graph.nodes[index]
        if index in self.loops:
            loop = self.loops[index]
            wires = zip(node.outputs, loop.control.results, strict=True)
            return [value for value, wire in wires if wire.slot in loop.varying]
        if self.rules[index].alias:
            return [made for made, held in zip(node.outputs, node.inputs, strict=True) if held in self.varying]
        return node.outputs

    def _ask_up_front(self, node: Node) -> bool:
        """Whether the operands that stand in the way come from the batch alone, and can be computed before the loop."""
        sums = [v for v in node.inputs if v in self.varying and self.home[v].partial]
        wanted = sums or [v for v in node.inputs if v in self.varying]
        makers = {self.graph.producers[v] for v in wanted if v in self.graph.producers and v not in self.tainted}
        if self.waits or len(makers) < len(set(wanted)) or makers <= self.up_front:
            return False
        self.wanted_up_front |= makers
        return True

    def _postpone(self, index: int, refusal: _Refusal | None) -> None:
        node = self.graph.nodes[index]
        self.later.add(index)
        self.late_values.update(node.outputs)
        self.varying.update(node.outputs)
        self.home.update((v, replicated(self.graph.types[v].rank)) for v in node.outputs)
        if refusal and (self.inside or phase(node) != "apply"):
            self.refusals.append(refusal)

    def _place(self, index: int) -> Placement | _Refusal:
        """Where a node that meets the batch stands on the axis, or why it cannot."""
        node, rule = self.graph.nodes[index], self.rules[index]
        if rule.once:
            return _Refusal(node=node, words=rule.reason)
        if not self.inside and phase(node) == "apply" and any(self._is_sum(v) for v in node.inputs):
            return _Refusal(node=node, words="a sum over microbatches is used after the gradient")
        control = control_of(node, self.graph)
        if control:
            found = self._settle(node, control)
            if isinstance(found, _Refusal):
                return found
            self.loops[index] = found
            placement = found.placement()
            if not all(map(self._fits, node.inputs, placement.operands)):
                return _Refusal(node=node, words="a loop wants the batch in two ways")
            return placement
        if rule.alias:
            whole = (replicated(self.graph.types[v].rank) for v in node.inputs)  # as free values are
            specs = tuple(self.home.get(v, spec) for v, spec in zip(node.inputs, whole, strict=True))
            return Placement(operands=specs, results=specs)
        for factor in range(len(rule.factors)):
            assignment = ((AXIS, factor),)
            if rule.factors[factor].size % self.time.count or rule.factors[factor].reduction not in ("", "add"):
                continue
            operands = tuple(rule.operand_spec(o, assignment) for o in range(len(node.inputs)))
            if all(map(self._fits, node.inputs, operands)):
                results = tuple(rule.result_spec(r, assignment) for r in range(len(node.outputs)))
                return Placement(operands=operands, results=results)
        if self.coupling == "independent" and not rule.reason:
            whole = _whole(node, self.graph)
            if all(map(self._fits, node.inputs, whole.operands)):
                return whole
        return _Refusal(node=node, words=self._why_not(node, rule))

    def _why_not(self, node: Node, rule: ShardingRule) -> str:
        if rule.reason:
            return rule.reason
        if any(self._is_sum(v) for v in node.inputs):
            return "a sum over the batch is used before all of it is there"
        return "the batch dimension is reduced, indexed or reordered"

    def _is_sum(self, value: int) -> bool:
        return value in self.varying and bool(self.home[value].partial)

    def _fits(self, value: int, wanted: ShardingSpec) -> bool:
        """Whether a value can be had in a placement while a microbatch runs."""
        if value not in self.varying:
            return True
        held = self.home[value]
        if held == wanted:
            return True
        if self.coupling == "exact":
            return False
        return (held.is_replicated and bool(wanted.partial)) or (bool(held.partial) and wanted.is_replicated)

    def leaving(self, value: int) -> ShardingSpec:
        """The placement in which a value leaves the loop: each microbatch's own is averaged, which is a sum."""
        held = self.home[value]
        return ShardingSpec(dims=held.dims, partial=(AXIS,)) if held.is_replicated else held

    def _settle(self, node: Node, control: Control) -> _Loop | _Refusal:
        """A loop or branch with its carries at a fixed point."""

        def refuse(words: str) -> _Refusal:
            return _Refusal(node=node, words=words)

        slots: dict[int, ShardingSpec] = {}
        varying: set[int] = set()
        for value, wire in zip(node.inputs, control.operands, strict=True):
            spec = self.home.get(value, replicated(self.graph.types[value].rank))
            if wire.stacked and spec.dims[0]:
                return refuse("a loop runs over the batch")
            slots[wire.slot] = ShardingSpec(dims=spec.dims[1:], partial=spec.partial) if wire.stacked else spec
            if value in self.varying:
                varying.add(wire.slot)
        for _ in range(len(control.slots) + 1):
            before = dict(slots), set(varying)
            walks = [self._inside(body, slots, varying) for body in control.bodies]
            for body, walk in zip(control.bodies, walks, strict=True):
                if walk.refusals:
                    return walk.refusals[0]
                for slot, value in zip(body.outputs, body.graph.outputs, strict=True):
                    spec = walk.home.get(value, replicated(body.graph.types[value].rank))
                    if value not in walk.varying:
                        slots.setdefault(slot, spec)
                    elif slot in varying and slots[slot] != spec:
                        return refuse("a loop carries the batch in two ways")
                    else:
                        slots[slot] = spec
                        varying.add(slot)
            if (slots, varying) == before:
                break
        else:
            return refuse("a loop's carries do not settle")
        if any(slot.whole and s in varying for s, slot in enumerate(control.slots)):
            return refuse("a loop's test depends on the batch")
        if node.primitive == "cond" and 0 in varying:
            return refuse("a branch is chosen by the batch")
        return _Loop(control=control, slots=slots, varying=frozenset(varying), walks=tuple(walks))

    def _inside(self, body: Body, slots: Mapping[int, ShardingSpec], varying: set[int]) -> _Walk:
        graph = body.graph
        rules = {i: rule_of(node, graph) for i, node in enumerate(graph.nodes)}
        walk = _Walk(graph, self.time, rules, self.coupling, inside=True)
        entering = zip(graph.inputs, body.inputs, strict=True)
        walk.start([slots[s] for s in body.inputs], {v for v, slot in entering if slot in varying})
        walk.run()
        return walk

    def sink(self) -> None:
        """Computes in pieces what is wanted in pieces only: random bits are drawn a microbatch at a time."""
        wanted = self.wanted

        def want(values: Sequence[int], specs: Sequence[ShardingSpec]) -> None:
            for value, spec in zip(values, specs, strict=True):
                if value not in self.varying and value not in self.free and value not in self.graph.literals:
                    wanted.setdefault(value, set()).add(spec)

        want(self.graph.outputs if self.inside else (), self.outputs)
        for index in reversed(range(len(self.graph.nodes))):
            node = self.graph.nodes[index]
            if index in self.later or is_free(self.graph, index):
                continue
            if index in self.loops:
                self.placements[index] = self._finished(index, wanted)
            if index in self.loops or any(v in self.varying for v in node.outputs):
                want(node.inputs, self.placements[index].operands)
            elif index not in self.up_front and (found := self._in_pieces(index, wanted)):
                self.placements[index] = found
                want(node.inputs, found.operands)
            elif self.inside:
                want(node.inputs, self.placements[index].operands)

    def _finished(self, index: int, wanted: Mapping[int, set[ShardingSpec]]) -> Placement:
        """A loop or branch with its bodies; results that microbatches do not change are cut as all want them."""
        node, loop = self.graph.nodes[index], self.loops[index]
        entering = {slot for body in loop.control.bodies for slot in body.inputs}
        for value, wire in zip(node.outputs, loop.control.results, strict=True):
            specs = wanted.get(value, set[ShardingSpec]())
            if len(specs) != 1 or wire.slot in loop.varying or wire.slot in entering:
                continue
            (spec,) = specs
            if not spec.partial and not (wire.stacked and spec.dims[0]):
                loop.slots[wire.slot] = ShardingSpec(dims=spec.dims[1:]) if wire.stacked else spec
                self.home[value] = spec
        for body, walk in zip(loop.control.bodies, loop.walks, strict=True):
            walk.outputs = tuple(loop.slots[s] for s in body.outputs)
            walk.sink()
        loop.narrow()
        bodies = zip(loop.control.bodies, loop.walks, strict=True)
        return loop.placement(tuple(walk.layout([loop.slots[s] for s in body.inputs]) for body, walk in bodies))

    def _in_pieces(self, index: int, wanted: Mapping[int, set[ShardingSpec]]) -> Placement | None:
        """A node that no microbatch changes, cut as everyone wants its result."""
        node, rule = self.graph.nodes[index], self.rules[index]
        specs = set(itertools.chain.from_iterable(wanted.get(v, ()) for v in node.outputs))
        if len(node.outputs) != 1 or len(specs) != 1 or node.subgraphs or rule.alias:
            return None
        (spec,) = specs
        if spec.partial or spec.is_replicated:
            return None
        for factor in range(len(rule.factors)):
            assignment = ((AXIS, factor),)
            if rule.factors[factor].size % self.time.count == 0 and rule.result_spec(0, assignment) == spec:
                operands = tuple(rule.operand_spec(o, assignment) for o in range(len(node.inputs)))
                if not any(o.partial for o in operands):
                    self.home[node.outputs[0]] = spec
                    return Placement(operands=operands, results=(spec,))
        return None

    def layout(self, inputs: Sequence[ShardingSpec]) -> Layout:
        placements = [self.placements.get(i) or _whole(node, self.graph) for i, node in enumerate(self.graph.nodes)]
        return Layout(inputs=tuple(inputs), placements=tuple(placements), outputs=self.outputs)


@dataclass(slots=True, kw_only=True)
class _Loop:
    """A loop or branch: where its slots stand in time, which of them `varying` microbatches change, its bodies."""

    control: Control
    slots: dict[int, ShardingSpec]
    varying: frozenset[int]
    walks: tuple[_Walk, ...]

    def narrow(self) -> None:
        """Takes in pieces what no microbatch changes and every body reads in pieces: a mask broadcast over the batch.

        Whole, it would be as large as that of all microbatches, and each iteration would take its piece of it.
        """
        made = {slot for body in self.control.bodies for slot in body.outputs}
        wanted: dict[int, set[ShardingSpec]] = {}
        for body, walk in zip(self.control.bodies, self.walks, strict=True):
            for value, slot in zip(body.graph.inputs, body.inputs, strict=True):
                wanted.setdefault(slot, set()).update(walk.wanted.get(value, ()))
        for slot, specs in wanted.items():
            fixed = slot not in self.varying and slot not in made and not self.control.slots[slot].whole
            if fixed and len(specs) == 1 and not any(spec.partial for spec in specs):
                (self.slots[slot],) = specs

    def placement(self, bodies: tuple[Layout, ...] = ()) -> Placement:
        operands, results = (
            tuple(_stacked(self.slots[wire.slot]) if wire.stacked else self.slots[wire.slot] for wire in wires)
            for wires in (self.control.operands, self.control.results)
        )
        return Placement(operands=operands, results=results, bodies=bodies)


def _stacked(spec: ShardingSpec) -> ShardingSpec:
    return ShardingSpec(dims=((), *spec.dims), partial=spec.partial)
