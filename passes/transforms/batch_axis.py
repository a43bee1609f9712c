"""The batch axis in time, operator by operator: where each value is cut, or why it cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from passes.ir import Body, Control, Graph, Node, control_of, phase
from passes.placement import Layout, Placement, is_free
from passes.rules import ShardingRule, rules_of
from passes.sharding import ANY, ShardingSpec, Step, replicated

AXIS = "microbatch"


Coupling = Literal["exact", "independent"]


PICKED = "rows are picked by an index that may be of any row of the batch, as of a permutation of it"
"""The reason why what reads them has no place in a microbatch."""

_NOWHERE = replicated(0)
"""The placement of literals and free values, which are made wherever they are read."""


@dataclass(frozen=True, slots=True)
class Time:
    """The one axis in time, as a mesh: what a value's `local_shape` on it is, is its shape in one microbatch; of a
    batch of a `single` row that is all of it. So it is in a single microbatch, which can compute everything.
    """

    count: int
    single: bool = False

    def rules(self, graph: Graph) -> dict[int, ShardingRule]:
        """The rule of each node, by number."""
        rules = rules_of(graph)
        return dict(enumerate(rule.with_single() if self.single else rule for rule in rules))

    @property
    def axes(self) -> tuple[str, ...]:
        return (AXIS,)

    def axis_size(self, axis: str) -> int:
        return self.count

    def steps(self, type: object, before: ShardingSpec, after: ShardingSpec) -> tuple[Step, ...]:
        """The one step from a placement in time to another: `Walk` asks for no other than these. A single microbatch
        has the same array in all of them.
        """
        if self.count == 1:
            return ()
        if before.partial:
            return (Step(kind="all_reduce", axes=(AXIS,)),)
        if after.partial:
            return (Step(kind="keep", axes=(AXIS,)),)
        (cut,) = (d for d, axes in enumerate(after.dims) if axes)
        return (Step(kind="slice", axes=(AXIS,), to_dim=cut),)

    def is_packed(self, type: object, after: ShardingSpec, steps: Sequence[Step]) -> bool:
        """Whether a sum is packed with others into one collective: it is not, as nothing is sent in time."""
        return False


def whole_layout(graph: Graph) -> Layout:
    """Everything whole, bodies of loops and branches included."""

    def whole_specs(values: Iterable[int]) -> tuple[ShardingSpec, ...]:
        return tuple(replicated(graph.types[v].rank) for v in values)

    return Layout(
        inputs=whole_specs(graph.inputs),
        placements=tuple(_whole(node, graph) for node in graph.nodes),
        outputs=whole_specs(graph.outputs),
    )


def _whole(node: Node, graph: Graph) -> Placement:
    return Placement(
        operands=tuple(replicated(graph.types[v].rank) for v in node.inputs),
        results=tuple(replicated(graph.types[v].rank) for v in node.outputs),
        bodies=tuple(map(whole_layout, node.subgraphs)) if control_of(node, graph) else (),
    )


def only_reports(node: Node) -> bool:
    """Whether a node makes nothing that others wait for, and can run when all microbatches are done."""
    return not node.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A node that needs its whole batch at once, and why."""

    node: Node
    words: str

    def __str__(self) -> str:
        return named(self.node)


def named(node: Node) -> str:
    """A node in words: its operator, line and scope."""
    where = " at ".join(filter(None, (node.primitive, node.source)))
    return where + (f" ({node.scope})" if node.scope else "")


class Walk:
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
        self.mixed: set[int] = set()  # values that come from more than the batch and random keys
        self.heavy: set[int] = set()  # of these, what products or loops make: not to be computed twice
        self.joined: set[int] = set()  # late values that are made of pieces of the batch
        self.free: set[int] = set()
        self.later: set[int] = set()
        self.late_values: set[int] = set()
        self.placements: dict[int, Placement] = {}
        self.refusals: list[Refusal] = []
        self.delayed: list[Refusal] = []  # of the apply phase, which may wait unless the backward pass needs it
        self.loops: dict[int, LoopInTime] = {}
        self.outputs: tuple[ShardingSpec, ...] = ()
        self.read_specs: dict[int, set[ShardingSpec]] = {}  # where values that microbatches do not change are read

    def start(self, inputs: Sequence[ShardingSpec], varying: set[int]) -> None:
        self.home = dict(zip(self.graph.inputs, inputs, strict=True))
        self.home |= {v: replicated(self.graph.types[v].rank) for v in self.graph.constants}
        self.varying = set(varying)
        self.mixed = {v for v in self.graph.inputs if v not in varying and not self._is_key(v)}

    def run(self) -> None:
        for index in range(len(self.graph.nodes)):
            self._visit(index)

    def _visit(self, index: int) -> None:
        graph, node = self.graph, self.graph.nodes[index]
        if is_free(graph, index):
            self.free.update(node.outputs)
            return
        if not self.mixed.isdisjoint(node.inputs):
            self.mixed.update(v for v in node.outputs if not self._is_key(v))
            if node.subgraphs or not self.rules[index].light or not self.heavy.isdisjoint(node.inputs):
                self.heavy.update(node.outputs)
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
        placed = self._place(index)
        if isinstance(placed, Placement):
            self.placements[index] = placed
            self.home.update(zip(node.outputs, placed.results, strict=True))
            self.varying.update(self._varying_results(index))
            self.beside.update(v for v in node.outputs if v not in self.varying)
            return
        repaired = not self.inside and (only_reports(node) or self._ask_up_front(index))
        self._postpone(index, None if repaired else placed)

    def _varying_results(self, index: int) -> Iterable[int]:
        """The places of a node's results on the batch; some results of a loop or barrier have nothing to do with it."""
        node = self.graph.nodes[index]
        if index in self.loops:
            loop = self.loops[index]
            port_uses = zip(node.outputs, loop.control.results, strict=True)
            return [value for value, port_use in port_uses if port_use.port in loop.varying]
        if self.rules[index].alias:
            return [
                result for result, operand in zip(node.outputs, node.inputs, strict=True) if operand in self.varying
            ]
        return node.outputs

    def _ask_up_front(self, index: int) -> bool:
        """Whether the operands that stand in the way can be computed before the loop: they come from the batch alone,
        or without products, as a count of rows that is added to the state's. So can a node itself that reduces those
        to what is no sum, such as the largest, or puts rows in another order.
        """
        node = self.graph.nodes[index]
        sums = [v for v in node.inputs if v in self.varying and self.home[v].partial]
        if not self.waits and self.heavy.isdisjoint(node.inputs) and (not sums or _cut(self, index, is_any=True)):
            self.wanted_up_front.add(index)
            return True
        needed = sums or [v for v in node.inputs if v in self.varying]
        makers = {self.graph.producers[v] for v in needed if v in self.graph.producers and v not in self.heavy}
        if self.waits or len(makers) < len(set(needed)) or makers <= self.up_front:
            return False
        self.wanted_up_front |= makers
        return True

    def _postpone(self, index: int, refusal: Refusal | None) -> None:
        node = self.graph.nodes[index]
        if any(v in self.joined or any(self.home.get(v, _NOWHERE).dims) for v in node.inputs):
            self.joined.update(node.outputs)
        self.later.add(index)
        self.late_values.update(node.outputs)
        self.varying.update(node.outputs)
        self.home.update((v, replicated(self.graph.types[v].rank)) for v in node.outputs)
        if refusal:
            late = not self.inside and phase(node) == "apply"
            (self.delayed if late else self.refusals).append(refusal)

    def _place(self, index: int) -> Placement | Refusal:
        """The place on the axis of a node that meets the batch, or why it has none."""
        node, rule = self.graph.nodes[index], self.rules[index]
        if rule.once:
            return Refusal(node=node, words=rule.reason)
        if not self.inside and phase(node) == "apply" and any(self._is_sum(v) for v in node.inputs):
            return Refusal(node=node, words=self._why_not(node, rule))
        control = control_of(node, self.graph)
        if control:
            settled = _settle(self, node, control)
            if isinstance(settled, Refusal):
                return settled
            self.loops[index] = settled
            placement = settled.placement()
            if not all(map(self.fits, node.inputs, placement.operands)):
                return Refusal(node=node, words="a loop wants the batch in two ways")
            return placement
        if rule.alias:
            operand_specs = (replicated(self.graph.types[v].rank) for v in node.inputs)  # as free values are
            specs = tuple(self.home.get(v, spec) for v, spec in zip(node.inputs, operand_specs, strict=True))
            return Placement(operands=specs, results=specs)
        if placement := _cut(self, index, is_any=self.waits):
            return placement
        if self.time.count == 1 or (self.coupling == "independent" and not rule.reason):
            whole = _whole(node, self.graph)
            if all(map(self.fits, node.inputs, whole.operands)):
                return whole
        return Refusal(node=node, words=self._why_not(node, rule))

    def _why_not(self, node: Node, rule: ShardingRule) -> str:
        if rule.reason:
            return rule.reason
        sums = [v for v in node.inputs if self._is_sum(v)]
        if any(self._is_picked(v) for v in sums):
            return PICKED
        if sums:
            return "a sum over the batch is used before all of it is there"
        return "the batch dimension is reduced, indexed or reordered"

    def _is_picked(self, value: int) -> bool:
        """Whether a sum is of rows that are picked by an index: a microbatch adds those that it has."""
        maker = self.graph.producers.get(value)
        if maker is None:
            return False
        sums = [v for v in self.graph.nodes[maker].inputs if self._is_sum(v)]
        return bool(self.rules[maker].sparse) or any(map(self._is_picked, sums))

    def _is_key(self, value: int) -> bool:
        return self.graph.types[value].is_key

    def _is_sum(self, value: int) -> bool:
        return value in self.varying and bool(self.home[value].partial)

    def fits(self, value: int, target: ShardingSpec) -> bool:
        """Whether a value can be had in a placement while a microbatch runs."""
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

    def layout(self, inputs: Sequence[ShardingSpec]) -> Layout:
        placements = [self.placements.get(i) or _whole(node, self.graph) for i, node in enumerate(self.graph.nodes)]
        return Layout(inputs=tuple(inputs), placements=tuple(placements), outputs=self.outputs)


def _cut(walk: Walk, index: int, *, is_any: bool) -> Placement | None:
    """The place of a node that computes a microbatch by itself, or reduces it by a sum, or in any way if `is_any`;
    None where there is none.
    """
    node, rule = walk.graph.nodes[index], walk.rules[index]
    for factor, properties in enumerate(rule.factors):
        assignment = ((AXIS, factor),)
        if properties.size % walk.time.count or not (is_any or properties.reduction in ("", "add", ANY)):
            continue
        placement = Placement.of(rule, assignment)
        if all(map(walk.fits, node.inputs, placement.operands)):
            return replace(placement, results=tuple(map(_of_its_own, placement.results)))
    return None


def _of_its_own(spec: ShardingSpec) -> ShardingSpec:
    """The placement of a result: whether any row goes on is asked of a microbatch's own rows."""
    return replicated(len(spec.dims)) if spec.partial and spec.reduction == ANY else spec


def _settle(walk: Walk, node: Node, control: Control) -> LoopInTime | Refusal:
    """A loop or branch with its carries at a fixed point."""

    def refuse(reason: str) -> Refusal:
        return Refusal(node=node, words=reason)

    ports: dict[int, ShardingSpec] = {}
    varying: set[int] = set()
    for value, port_use in zip(node.inputs, control.operands, strict=True):
        spec = walk.home.get(value, replicated(walk.graph.types[value].rank))
        if port_use.stacked and spec.dims[0] and walk.time.count > 1:
            return refuse("a loop runs over the batch")
        ports[port_use.port] = ShardingSpec(dims=spec.dims[1:], partial=spec.partial) if port_use.stacked else spec
        if value in walk.varying:
            varying.add(port_use.port)
    for _ in range(len(control.ports) + 1):
        state_before = dict(ports), set(varying)
        inner = [_inside(walk, body, ports, varying) for body in control.bodies]
        for body, inside in zip(control.bodies, inner, strict=True):
            if inside.refusals:
                return inside.refusals[0]
            for port, value in zip(body.outputs, body.graph.outputs, strict=True):
                spec = inside.home.get(value, replicated(body.graph.types[value].rank))
                if value not in inside.varying:
                    ports.setdefault(port, spec)
                elif port in varying and ports[port] != spec:
                    return refuse("a loop carries the batch in two ways")
                else:
                    ports[port] = spec
                    varying.add(port)
        if (ports, varying) == state_before:
            break
    else:
        return refuse("a loop's carries do not settle")
    tests = (ports[s] for s, port in enumerate(control.ports) if port.whole and s in varying)
    if walk.time.count > 1 and not all(spec.is_replicated for spec in tests):
        return refuse("a loop's test depends on the batch")
    if walk.time.count > 1 and control.choice in varying:
        return refuse("a branch is chosen by the batch")
    return LoopInTime(control=control, ports=ports, varying=frozenset(varying), walks=tuple(inner))


def _inside(walk: Walk, body: Body, ports: Mapping[int, ShardingSpec], varying: set[int]) -> Walk:
    graph = body.graph
    inside = Walk(graph, walk.time, walk.time.rules(graph), walk.coupling, inside=True)
    entering = zip(graph.inputs, body.inputs, strict=True)
    inside.start([ports[s] for s in body.inputs], {v for v, port in entering if port in varying})
    inside.run()
    return inside


@dataclass(slots=True, kw_only=True)
class LoopInTime:
    """A loop or branch: where its ports stand in time, which of them `varying` microbatches change, its bodies."""

    control: Control
    ports: dict[int, ShardingSpec]
    varying: frozenset[int]
    walks: tuple[Walk, ...]

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
