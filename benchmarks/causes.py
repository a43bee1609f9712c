"""What every collective of a plan is for: the tensor that it brings, the layer, the axis, and when in the step.

A plan says where everything is; `passes.placement.reshardings` says which tensors that moves. Here each step of a move
that sends something gets a cause, found on the program alone: what a value is follows from the inputs that it depends
on and from the dimension that the batch is on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from passes.cluster import Mesh, collectives
from passes.ir import Control, Graph, Node, TensorType, control_of, phase
from passes.placement import Layout, Move, Schedule, moves
from passes.plan import Plan
from passes.rules import rule_of
from passes.sharding import Resharder, ShardingSpec

Value = tuple[int, int]
"""(number of the region, value): a value of the program or of a loop's or branch's body."""

Spot = tuple[int, int]
"""(number of the region, node)."""

LAYER = re.compile(r"[A-Za-z]\w*_\d+$|^Block$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """A graph as placed, with its loops and branches by node; it runs `trips` times with probability `share`."""

    number: int
    graph: Graph
    layout: Layout
    schedule: Schedule
    trips: int
    share: float
    end: str
    joints: Mapping[int, tuple[Control, tuple[Region, ...]]]

    def all(self) -> Iterator[Region]:
        """This region and those inside it, inner ones at their place."""
        yield self
        for _, bodies in self.joints.values():
            for body in bodies:
                yield from body.all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One step of a move that sends something, `count` times a step.

    `nbytes` is the result of one on one device. `role` is parameter, gradient, updated parameter, optimizer state,
    activation, activation gradient, statistic (what is reduced over the batch: a loss, a mean) or constant;
    `parameter` is the input that a parameter, its gradient or its update belongs to. The step is from `before` to
    `after`.
    """

    role: str
    tensor: str
    layer: str
    kind: collectives.Kind
    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    count: int
    seconds: float
    phase: str
    where: str
    value: Value
    parameter: int | None
    type: TensorType
    before: ShardingSpec
    after: ShardingSpec

    @property
    def total_nbytes(self) -> int:
        """Bytes of all of them."""
        return self.nbytes * self.count


def layer_of(scope: str) -> str:
    """The numbered module that a scope lies in, else its first module; `Block` for one that a loop repeats."""
    parts = [p for p in re.split(r"/", re.sub(r"(?:transpose|jvp)\(|\)|rematted_computation", "", scope)) if p]
    numbered = [part for part in parts if LAYER.search(part)]
    return numbered[0] if numbered else next((part for part in parts[1:] if "<lambda>" not in part), "model")


def when(node: Node) -> str:
    """`forward`, `recomputed`, `backward` or `apply`: what a node belongs to."""
    return "recomputed" if "rematted_computation" in node.scope else phase(node)


def is_early(node: Node) -> bool:
    """Whether a node computes activations, not gradients; what has no gradient (a softmax's maximum) has no phase."""
    return when(node) != "backward"


@dataclass(kw_only=True)
class Program:
    """A traced step as a plan places it, and what its values are."""

    graph: Graph
    plan: Plan
    state_pairs: Sequence[tuple[int, int]]
    root: Region = field(init=False)
    resharder: Resharder = field(init=False)

    def __post_init__(self) -> None:
        self.resharder = Resharder(self.plan.mesh)
        schedule = moves(self.graph, self.plan.layout, self.resharder, refetch=self.plan.refetch)
        self.root = _region(self.graph, self.plan.layout, schedule, 1, 1.0, "output", [0])

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @cached_property
    def regions(self) -> Mapping[int, Region]:
        """The regions by number."""
        return {region.number: region for region in self.root.all()}

    @cached_property
    def returned(self) -> frozenset[int]:
        """The positions of inputs that the step returns again."""
        return frozenset(i for _, i in self.state_pairs)

    @cached_property
    def parameters(self) -> frozenset[int]:
        """The positions of inputs that are returned and read by the forward pass."""
        graph = self.graph
        return frozenset(
            i
            for i in self.returned
            if any(phase(graph.nodes[r]) == "forward" for r in graph.consumers.get(graph.inputs[i], ()))
        )

    @cached_property
    def batch(self) -> Mapping[Value, frozenset[int]]:
        """The dimensions of every value that the batch is on; values that it does not reach are absent."""
        found: dict[Value, set[int]] = defaultdict(set)
        for i, v in enumerate(self.graph.inputs):
            type = self.graph.types[v]
            if i not in self.returned and type.rank and not type.dtype.startswith("key<"):
                found[0, v].add(0)
        before = -1
        while before != (before := sum(map(len, found.values()))):
            for region in self.root.all():
                _spread(region, found)
        return {value: frozenset(dims) for value, dims in found.items() if dims}

    @cached_property
    def sources(self) -> Mapping[Value, int]:
        """The inputs that every value depends on, as a set of bits by position."""
        found: dict[Value, int] = {(0, v): 1 << i for i, v in enumerate(self.graph.inputs)}
        before: object = None
        while before != (before := sum(bits.bit_count() for bits in found.values())):
            for region in self.root.all():
                _depend(region, found)
        return found

    @cached_property
    def families(self) -> Mapping[Value, int]:
        """The parameter that a gradient or an update belongs to: walked back from the outputs over equal sizes."""
        found: dict[Value, int] = {}
        for o, i in self.state_pairs:
            if i in self.parameters:
                self._family((0, self.graph.outputs[o]), i, found)
        return found

    def _family(self, value: Value, parameter: int, found: dict[Value, int]) -> None:
        if value in found or value in self.batch:
            return
        region, v = self.regions[value[0]], value[1]
        producer = region.graph.producers.get(v)
        if producer is None:
            return
        node = region.graph.nodes[producer]
        if phase(node) == "forward":
            return
        found[value] = parameter
        if producer in region.joints:
            control, bodies = region.joints[producer]
            slot = control.results[node.outputs.index(v)].slot
            for inner, out in _leaving(control, bodies, slot):
                self._family((inner.number, out), parameter, found)
            return
        rule = rule_of(node, region.graph)
        if rule.alias:
            self._family((region.number, node.inputs[node.outputs.index(v)]), parameter, found)
        elif rule.light:
            size = region.graph.types[v].size
            for operand in node.inputs:
                if region.graph.types[operand].size == size:
                    self._family((region.number, operand), parameter, found)

    def is_moving(self, value: Value) -> bool:
        """Whether a value depends on the batch, and is no mask that is merely as large."""
        bits = self.sources.get(value, 0)
        return any(bits >> i & 1 for i in range(len(self.graph.inputs)) if i not in self.returned)

    def role(self, value: Value) -> tuple[str, int | None]:
        """What a value is, and the position of the parameter that it belongs to."""
        region, v = self.regions[value[0]], value[1]
        producer = region.graph.producers.get(v)
        node = region.graph.nodes[producer] if producer is not None else None
        bits = self.sources.get(value, 0)
        positions = [i for i in range(bits.bit_length()) if bits >> i & 1]
        if positions and self.parameters.issuperset(positions):
            return "parameter", positions[0]
        if value in self.families:
            late = node is not None and phase(node) == "apply"
            return ("updated parameter" if late else "gradient"), self.families[value]
        if value in self.batch and self.is_moving(value):
            early = node is None or is_early(node)
            return ("activation" if early else "activation gradient"), None
        if positions and self.returned.issuperset(positions):
            return "optimizer state", None
        return ("statistic" if positions else "constant"), None

    def describe(self, value: Value, role: str, parameter: int | None) -> str:
        """The value in words."""
        region, v = self.regions[value[0]], value[1]
        if parameter is not None:
            return self.graph.input_names[parameter]
        if value[0] == 0 and v in self.graph.inputs:
            return self.graph.input_names[self.graph.inputs.index(v)]
        producer = region.graph.producers.get(v)
        made = f"{region.graph.nodes[producer].primitive} " if producer is not None else "carried "
        return made + str(region.graph.types[v])

    def sent(self) -> Iterator[Sent]:
        """Every step of every move that sends something."""
        for region in self.root.all():
            for index, before in enumerate(region.schedule.before):
                node = region.graph.nodes[index] if index < len(region.graph.nodes) else None
                for move in before:
                    yield from self._steps(region, node, move)

    def _steps(self, region: Region, node: Node | None, move: Move) -> Iterator[Sent]:
        graph, value = region.graph, (region.number, move.value)
        type, spec = graph.types[move.value], move.before
        role, parameter = self.role(value)
        producer = graph.producers.get(move.value)
        maker = graph.nodes[producer] if producer is not None else None
        for step in move.steps:
            source, spec = spec, step.apply(spec)
            if step.kind == "slice" or step.kind == "keep":
                continue
            reduces = step.kind in ("all_reduce", "reduce_scatter")
            placed = maker if reduces and maker is not None else node or maker
            at = when(placed) if placed else "apply"
            yield Sent(
                role=role,
                tensor=self.describe(value, role, parameter),
                layer=layer_of(placed.scope) if placed else "model",
                kind=step.kind,
                axes=step.axes,
                dtype=type.dtype,
                nbytes=spec.local_nbytes(type, self.mesh),
                count=region.trips,
                seconds=region.trips * region.share * self.resharder.cost(type, source, spec),
                phase="forward" if at == "apply" and role in ("activation", "statistic", "constant") else at,
                where=node.source if node else region.end,
                value=value,
                parameter=parameter,
                type=type,
                before=source,
                after=spec,
            )

    def origins(self, value: Value, axis: str) -> frozenset[Spot]:
        """The nodes that first made a value partial over an axis."""
        found: set[Spot] = set()
        self._origins(value, axis, set(), found)
        return frozenset(found)

    def _origins(self, value: Value, axis: str, seen: set[Value], found: set[Spot]) -> None:
        if value in seen:
            return
        seen.add(value)
        region, v = self.regions[value[0]], value[1]
        producer = region.graph.producers.get(v)
        if producer is None:
            return
        node, placement = region.graph.nodes[producer], region.layout.placements[producer]
        if producer in region.joints:
            control, bodies = region.joints[producer]
            slot = control.results[node.outputs.index(v)].slot
            for inner, out in _leaving(control, bodies, slot):
                self._origins((inner.number, out), axis, seen, found)
            return
        partial = [
            operand
            for operand, spec in zip(node.inputs, placement.operands, strict=True)
            if axis in spec.partial and operand in region.graph.producers
        ]
        if not partial:
            found.add((region.number, producer))
        for operand in partial:
            self._origins((region.number, operand), axis, seen, found)

    def made(self, spot: Spot) -> tuple[TensorType, ShardingSpec, int]:
        """The type and placement of what a node makes, and how often a step."""
        region = self.regions[spot[0]]
        node = region.graph.nodes[spot[1]]
        return region.graph.types[node.outputs[0]], region.layout.placements[spot[1]].results[0], region.trips


def all_reduce_seconds(mesh: Mesh, axes: Sequence[str], nbytes: float) -> float:
    """Seconds of one all-reduce of `nbytes` on each device, its launch included."""
    group = mesh.group(tuple(axes))
    return collectives.seconds("all_reduce", nbytes, group) + mesh.cluster.group().device.launch_seconds


def _region(
    graph: Graph, layout: Layout, schedule: Schedule, trips: int, share: float, end: str, numbers: list[int]
) -> Region:
    number, numbers[0] = numbers[0], numbers[0] + 1
    joints: dict[int, tuple[Control, tuple[Region, ...]]] = {}
    for index, inner in schedule.bodies.items():
        node = graph.nodes[index]
        control = control_of(node, graph)
        if control is None:
            continue
        placed = zip(control.bodies, layout.placements[index].bodies, inner, strict=True)
        joints[index] = (
            control,
            tuple(
                _region(body.graph, at, moved, trips * body.trips, share * body.share, node.source, numbers)
                for body, at, moved in placed
            ),
        )
    return Region(
        number=number, graph=graph, layout=layout, schedule=schedule, trips=trips, share=share, end=end, joints=joints
    )


def _leaving(control: Control, bodies: Sequence[Region], slot: int) -> Iterator[tuple[Region, int]]:
    """The values of bodies that leave through a slot."""
    for body, inner in zip(control.bodies, bodies, strict=True):
        for value, own in zip(body.graph.outputs, body.outputs, strict=True):
            if own == slot:
                yield inner, value


def _entering(control: Control, bodies: Sequence[Region], slot: int) -> Iterator[tuple[Region, int]]:
    """The values of bodies that enter through a slot."""
    for body, inner in zip(control.bodies, bodies, strict=True):
        for value, own in zip(body.graph.inputs, body.inputs, strict=True):
            if own == slot:
                yield inner, value


def _wires(region: Region, index: int) -> Iterator[tuple[Value, int, int]]:
    """(value, slot, dimensions in front of the slot's) of all that hangs on the slots of a loop or branch."""
    control, bodies = region.joints[index]
    node = region.graph.nodes[index]
    for values, wires in ((node.inputs, control.operands), (node.outputs, control.results)):
        for value, wire in zip(values, wires, strict=True):
            yield (region.number, value), wire.slot, int(wire.stacked)
    for slot in range(len(control.slots)):
        for inner, value in (*_entering(control, bodies, slot), *_leaving(control, bodies, slot)):
            yield (inner.number, value), slot, 0


def _spread(region: Region, found: dict[Value, set[int]]) -> None:
    """Adds the batch's dimensions that one pass over a region's nodes reaches."""
    graph, here = region.graph, region.number
    for index, node in enumerate(graph.nodes):
        if index in region.joints:
            wires = list(_wires(region, index))
            slots: dict[int, set[int]] = defaultdict(set)
            for value, slot, shift in wires:
                slots[slot] |= {d - shift for d in found.get(value, ()) if d >= shift}
            for value, slot, shift in wires:
                if slots[slot]:
                    found[value] |= {d + shift for d in slots[slot]}
            continue
        rule = rule_of(node, graph)
        if rule.alias:
            for value, result in zip(node.inputs, node.outputs, strict=True):
                if (here, value) in found:
                    found[here, result] |= found[here, value]
            continue
        sides = (*zip(node.inputs, rule.operands, strict=True), *zip(node.outputs, rule.results, strict=True))
        cut = {f for v, factors in sides for d in found.get((here, v), ()) if (f := factors[d]) >= 0}
        for value, factors in sides if cut else ():
            if value not in graph.literals and (dims := {d for d, f in enumerate(factors) if f in cut}):
                found[here, value] |= dims


def _depend(region: Region, found: dict[Value, int]) -> None:
    """Adds what one pass over a region's nodes finds that values depend on."""
    here, graph = region.number, region.graph
    for index, node in enumerate(graph.nodes):
        if index in region.joints:
            _through(region, index, found)
            continue
        if rule_of(node, graph).alias:
            for value, result in zip(node.inputs, node.outputs, strict=True):
                found[here, result] = found.get((here, value), 0)
            continue
        bits = 0
        for value in node.inputs:
            bits |= found.get((here, value), 0)
        for value in node.outputs:
            found[here, value] = bits


def _through(region: Region, index: int, found: dict[Value, int]) -> None:
    control, bodies = region.joints[index]
    node, slots = region.graph.nodes[index], defaultdict[int, int](int)
    for value, wire in zip(node.inputs, control.operands, strict=True):
        slots[wire.slot] |= found.get((region.number, value), 0)
    for slot in range(len(control.slots)):
        for inner, value in _leaving(control, bodies, slot):
            slots[slot] |= found.get((inner.number, value), 0)
        for inner, value in _entering(control, bodies, slot):
            found[inner.number, value] = slots[slot]
    for value, wire in zip(node.outputs, control.results, strict=True):
        found[region.number, value] = slots[wire.slot]
