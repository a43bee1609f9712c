"""The batch along the axis of time, operator by operator: how each value is cut into microbatches, or why it cannot be.

`BatchWalk` goes through a graph in order. A value is the same in all microbatches, cut along one of its dimensions, or
a sum of which each microbatch has a summand; sharding rules say how a node's results follow from its operands, as they
do for axes of devices. A node that cannot run on microbatches is computed before the loop over them, or after it, or
refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.ir import Body, Control, Graph, Node, control_of, phase
from passes.placement import Layout, Placement, is_free
from passes.rules import ShardingRule
from passes.sharding import ANY, ShardingSpec, replicated
from passes.transforms.time_axis import AXIS, Coupling, Time, whole

PICKED = "rows are picked by an index that may be of any row of the batch, as of a permutation of it"
"""The reason why readers of rows that are picked by an index have no place in a microbatch."""

RUNS_OVER = "a loop runs over the batch"
"""The reason why a loop over slices of the batch has no place in a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A node that needs its whole batch at once, and the reason."""

    node: Node
    reason: str


def location(node: Node) -> str:
    """A node as text: its primitive, its source line, and its module."""
    where = " at ".join(filter(None, (node.primitive, node.source)))
    return where + (f" ({node.scope})" if node.scope else "")


class BatchWalk:
    """The placements of a graph's values on the axis of time, found node by node.

    `home` is the placement in which each value is made. `varying` values differ between microbatches; `later` nodes
    need all of them. `up_front` nodes are computed before the loop on the whole batch: a walk that could use more
    collects them (`wanted_up_front`), and is repeated with them. Inside a loop or branch of the user's there is neither
    before nor after: a node that needs either is refused. With `waits`, whatever reduces the batch in any way has a
    place, and nothing is wanted up front. Refusals of the apply phase are `delayed`: they do not matter unless the
    backward pass needs the refused node; where there is one microbatch, those nodes are placed beside it (`at_once`).

    Results of a barrier or loop that stand `beside` varying values, and values made of these alone, do not vary, and
    are still computed inside the loop: weights that enter the barrier of a recomputed layer with its activations would
    otherwise bring all of the forward pass before it.
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
        at_once: frozenset[int] = frozenset(),
    ) -> None:
        self.graph, self.time, self.rules, self.inside, self.waits = graph, time, rules, inside, waits
        self.coupling: Coupling = coupling
        self.up_front, self.at_once = up_front, at_once
        self.wanted_up_front: set[int] = set()
        self.home: dict[int, ShardingSpec] = {}
        self.varying: set[int] = set()
        self.beside: set[int] = set()
        self.later: set[int] = set()
        self.placements: dict[int, Placement] = {}
        self.refusals: list[Refusal] = []
        self.delayed: list[Refusal] = []
        self.loops: dict[int, LoopInTime] = {}
        self._costly: frozenset[int] = frozenset()
        self._along: dict[tuple[int, int], Placement] = {}

    def run(self, inputs: Sequence[ShardingSpec], varying: Iterable[int]) -> None:
        """Places every node, given the placements of the inputs and those inputs that vary."""
        graph = self.graph
        self.home = dict(zip(graph.inputs, inputs, strict=True)) | {v: self.whole_spec(v) for v in graph.constants}
        self.varying = set(varying)
        if not (self.inside or self.waits):  # nothing is wanted up front there
            self._costly = costly_beside_the_batch(graph, self.rules, self.varying)
        for index, node in enumerate(graph.nodes):
            if not is_free(graph, index):
                self._visit(index, node)

    def whole_spec(self, value: int) -> ShardingSpec:
        return replicated(self.graph.types[value].rank)

    def spec(self, value: int) -> ShardingSpec:
        """The placement that a value is made in; literals and free values are made whole wherever they are read."""
        return self.home[value] if value in self.home else self.whole_spec(value)

    def _visit(self, index: int, node: Node) -> None:
        """Decides where a node is computed: after the loop, before it, inside it, or not at all."""
        if self.later and any(self.graph.producers.get(value) in self.later for value in node.inputs):
            self._postpone(index, node)
        elif index in self.up_front or self.varying.isdisjoint(node.inputs):
            self._keep_whole(index, node)
        elif isinstance(placement := self._place(index, node), Placement):
            self.placements[index] = placement
            self.home.update(zip(node.outputs, placement.results, strict=True))
            self.varying.update(self._varying_results(index, node))
            self.beside.update(v for v in node.outputs if v not in self.varying)
        else:
            if self.inside or (node.outputs and not self._ask_up_front(index, node)):
                self._refuse(placement)
            self._postpone(index, node)

    def _keep_whole(self, index: int, node: Node) -> None:
        """Leaves a node before the loop, where nothing is cut, or inside if it stands beside varying values."""
        self.home.update((v, self.whole_spec(v)) for v in node.outputs)
        is_beside = index not in self.up_front and not self.beside.isdisjoint(node.inputs)
        if self.inside or is_beside:
            self.placements[index] = whole(node, self.graph)
        if is_beside:
            self.beside.update(node.outputs)

    def _postpone(self, index: int, node: Node) -> None:
        """Leaves a node for after the loop."""
        self.later.add(index)
        self.varying.update(node.outputs)
        self.home.update((v, self.whole_spec(v)) for v in node.outputs)

    def _refuse(self, refusal: Refusal) -> None:
        may_wait = not self.inside and phase(refusal.node) == "apply"
        (self.delayed if may_wait else self.refusals).append(refusal)

    def _varying_results(self, index: int, node: Node) -> Iterable[int]:
        """The results of a node that vary; some results of a loop or barrier do not depend on the batch."""
        if index in self.loops:
            loop = self.loops[index]
            port_uses = zip(node.outputs, loop.control.results, strict=True)
            return [value for value, port_use in port_uses if port_use.port in loop.varying]
        if self.rules[index].alias:
            return [b for a, b in zip(node.inputs, node.outputs, strict=True) if a in self.varying]
        return node.outputs

    def _ask_up_front(self, index: int, node: Node) -> bool:
        """Whether the operands that stand in the way can be computed before the loop; if so, they are wanted up front.

        They can if they come from the batch alone, or without products, such as a count of rows that is added to the
        state's. So can a node itself that reduces those to something other than a sum, such as a maximum, or reorders
        rows.
        """
        if self.waits:
            return False
        sums = {v for v in node.inputs if self.is_sum(v)}
        is_costly = not self._costly.isdisjoint((*node.inputs, *node.outputs))
        if not is_costly and (not sums or self._cut(index, node, is_any=True)):
            self.wanted_up_front.add(index)
            return True
        needed = sums or self.varying.intersection(node.inputs)
        makers = {self.graph.producers[v] for v in needed - self._costly if v in self.graph.producers}
        if len(makers) < len(needed) or makers <= self.up_front:
            return False
        self.wanted_up_front |= makers
        return True

    def _place(self, index: int, node: Node) -> Placement | Refusal:
        """The placement on the axis of a node that meets the batch, or why it has none."""
        rule = self.rules[index]
        if rule.once:
            return Refusal(node=node, reason=rule.reason)
        is_update = phase(node) == "apply" and index not in self.at_once
        if not self.inside and is_update and any(map(self.is_sum, node.inputs)):
            return Refusal(node=node, reason=_why_not(self, node, rule))
        if control := control_of(node, self.graph):
            return self._place_loop(index, node, control)
        if rule.alias:
            specs = tuple(map(self.spec, node.inputs))
            return Placement(operands=specs, results=specs)
        if placement := self._cut(index, node, is_any=self.waits):
            return placement
        if self.time.count == 1 or (self.coupling == "independent" and not rule.reason):
            uncut = whole(node, self.graph)
            if all(map(self.fits, node.inputs, uncut.operands)):
                return uncut
        return Refusal(node=node, reason=_why_not(self, node, rule))

    def _place_loop(self, index: int, node: Node, control: Control) -> Placement | Refusal:
        """The placement of a loop or branch, or why it has none."""
        loop = _settled(self, node, control)
        if isinstance(loop, Refusal):
            return loop
        self.loops[index] = loop
        placement = loop.placement()
        if not all(map(self.fits, node.inputs, placement.operands)):
            return Refusal(node=node, reason="a loop wants the batch in two ways")
        return placement

    def _cut(self, index: int, node: Node, *, is_any: bool) -> Placement | None:
        """The placement of a node that computes each microbatch by itself, or reduces it by a sum, or in any way if
        `is_any`; None if there is none.

        If there is one microbatch, any placement is possible: the node keeps that of its operands if it can, as a
        loop's carries do.
        """
        rule = self.rules[index]
        fitting: list[Placement] = []
        for factor, properties in enumerate(rule.factors):
            if properties.size % self.time.count or not (is_any or properties.reduction in ("", "add", ANY)):
                continue
            placement = _along(self._along, rule, factor)
            if all(map(self.fits, node.inputs, placement.operands)) and _cuts_the_batch(self, node, placement):
                fitting.append(placement)
        if not fitting:
            return None
        as_it_lies = (p for p in fitting if self.time.count == 1 and all(map(self._lies, node.inputs, p.operands)))
        return next(as_it_lies, fitting[0])

    def _lies(self, value: int, target: ShardingSpec) -> bool:
        """Whether a value is made in a placement."""
        return value not in self.varying or self.home[value] == target

    def is_sum(self, value: int) -> bool:
        """Whether each microbatch has a summand of a value."""
        return value in self.varying and bool(self.home[value].partial)

    def fits(self, value: int, target: ShardingSpec) -> bool:
        """Whether a value can be brought to a placement while a microbatch runs."""
        if value not in self.varying:
            return True
        spec = self.home[value]
        if spec == target or self.time.count == 1:
            return True
        if self.coupling == "exact":
            return False
        return (spec.is_replicated and bool(target.partial)) or (bool(spec.partial) and target.is_replicated)

    def leaving(self, value: int) -> ShardingSpec:
        """The placement in which a value leaves the loop: each microbatch's own is averaged, which is a sum."""
        spec = self.home[value]
        return ShardingSpec(dims=spec.dims, partial=(AXIS,)) if spec.is_replicated else spec


def costly_beside_the_batch(graph: Graph, rules: Mapping[int, ShardingRule], batch: Collection[int]) -> frozenset[int]:
    """The values that must not be computed twice: they depend on more than the batch and random keys, through products
    or loops.
    """
    beside = {v for v in graph.inputs if v not in batch and not graph.types[v].is_key}
    costly: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if is_free(graph, index) or beside.isdisjoint(node.inputs):
            continue
        beside.update(v for v in node.outputs if not graph.types[v].is_key)
        if node.subgraphs or not rules[index].light or not costly.isdisjoint(node.inputs):
            costly.update(node.outputs)
    return frozenset(costly)


def _why_not(walk: BatchWalk, node: Node, rule: ShardingRule) -> str:
    """The reason why a node has no placement on the axis."""
    sums = [v for v in node.inputs if walk.is_sum(v)]
    if rule.reason:
        return rule.reason
    if any(is_picked(walk, v) for v in sums):
        return PICKED
    if sums:
        return "a sum over the batch is used before all of it is there"
    return "the batch dimension is reduced, indexed or reordered"


def is_picked(walk: BatchWalk, value: int) -> bool:
    """Whether a sum is over rows that are picked by an index: a microbatch adds the ones that it has."""
    maker = walk.graph.producers.get(value)
    if maker is None:
        return False
    sums = [v for v in walk.graph.nodes[maker].inputs if walk.is_sum(v)]
    return bool(walk.rules[maker].sparse) or any(is_picked(walk, v) for v in sums)


def _cuts_the_batch(walk: BatchWalk, node: Node, placement: Placement) -> bool:
    """Whether the axis cuts no operand, or one that varies: of others alone, independent microbatches would take
    pieces, and each would have a piece of the result, of its own rows alone.
    """
    cut = {v for v, spec in zip(node.inputs, placement.operands, strict=True) if any(spec.dims)}
    return walk.time.count == 1 or not cut or not cut.isdisjoint(walk.varying)


def _along(known: dict[tuple[int, int], Placement], rule: ShardingRule, factor: int) -> Placement:
    """The placement of a node whose factor the axis cuts, one object for all nodes of one rule; `known` has those so
    far.
    """
    key = id(rule), factor
    if key not in known:
        placement = Placement.of(rule, ((AXIS, factor),))
        known[key] = replace(placement, results=tuple(map(_of_its_own, placement.results)))
    return known[key]


def _of_its_own(spec: ShardingSpec) -> ShardingSpec:
    """The placement of a result; whether any row of a loop goes on is decided by a microbatch's own rows."""
    return replicated(len(spec.dims)) if spec.partial and spec.reduction == ANY else spec


@dataclass(slots=True, kw_only=True)
class LoopInTime:
    """A loop or branch on the axis of time: the placements of its ports, which of them are `varying`, and its
    bodies.
    """

    control: Control
    ports: dict[int, ShardingSpec]
    varying: frozenset[int]
    walks: tuple[BatchWalk, ...]

    def placement(self, bodies: tuple[Layout, ...] = ()) -> Placement:
        operands, results = (
            tuple(
                _stacked(self.ports[port_use.port]) if port_use.stacked else self.ports[port_use.port]
                for port_use in port_uses
            )
            for port_uses in (self.control.operands, self.control.results)
        )
        return Placement(operands=operands, results=results, bodies=bodies)


def _stacked(spec: ShardingSpec) -> ShardingSpec:
    return ShardingSpec(dims=((), *spec.dims), partial=spec.partial)


def _settled(walk: BatchWalk, node: Node, control: Control) -> LoopInTime | Refusal:
    """A loop or branch with its carries at a fixed point, or why it has no place."""
    is_cut = walk.time.count > 1
    ports = _Ports()
    for value, port_use in zip(node.inputs, control.operands, strict=True):
        spec = walk.spec(value)
        if port_use.stacked and spec.dims[0] and is_cut:
            return Refusal(node=node, reason=RUNS_OVER)
        inner = ShardingSpec(dims=spec.dims[1:], partial=spec.partial) if port_use.stacked else spec
        ports.enter(port_use.port, inner, value in walk.varying)
    for _ in range(len(control.ports) + 1):
        before = ports.copy()
        bodies = tuple(ports.walked(walk, body) for body in control.bodies)
        for body, inside in zip(control.bodies, bodies, strict=True):
            if inside.refusals:
                return inside.refusals[0]
            if not ports.take(body, inside):
                return Refusal(node=node, reason="a loop carries the batch in two ways")
        if ports == before:
            break
    else:
        return Refusal(node=node, reason="a loop's carries do not settle")
    tests = (ports.specs[s] for s, port in enumerate(control.ports) if port.whole and s in ports.varying)
    if is_cut and not all(spec.is_replicated for spec in tests):
        return Refusal(node=node, reason="a loop's test depends on the batch")
    if is_cut and control.choice in ports.varying:
        return Refusal(node=node, reason="a branch is chosen by the batch")
    return LoopInTime(control=control, ports=ports.specs, varying=frozenset(ports.varying), walks=bodies)


@dataclass(slots=True, kw_only=True)
class _Ports:
    """The ports of a loop or branch while its carries settle: their placements, and those that vary."""

    specs: dict[int, ShardingSpec] = field(default_factory=dict[int, ShardingSpec])
    varying: set[int] = field(default_factory=set[int])

    def copy(self) -> _Ports:
        return _Ports(specs=dict(self.specs), varying=set(self.varying))

    def enter(self, port: int, spec: ShardingSpec, is_varying: bool) -> None:
        """Sets what a port has when the loop begins."""
        self.specs[port] = spec
        if is_varying:
            self.varying.add(port)

    def walked(self, walk: BatchWalk, body: Body) -> BatchWalk:
        """The walk of a body that reads these ports."""
        graph = body.graph
        inside = BatchWalk(graph, walk.time, walk.time.rules(graph), walk.coupling, inside=True)
        entering = zip(graph.inputs, body.inputs, strict=True)
        inside.run([self.specs[port] for port in body.inputs], [v for v, port in entering if port in self.varying])
        return inside

    def take(self, body: Body, inside: BatchWalk) -> bool:
        """Whether the results of a body can be in these ports, which then have them: one that varies keeps its
        placement, and one microbatch has all of it in any.
        """
        for port, value in zip(body.outputs, body.graph.outputs, strict=True):
            spec = inside.spec(value)
            if value not in inside.varying:
                self.specs.setdefault(port, spec)
            elif port in self.varying and self.specs[port] != spec:
                if inside.time.count > 1:
                    return False
            else:
                self.enter(port, spec, True)
        return True
