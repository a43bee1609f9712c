"""A graph on one device under a plan, lowered as XLA's compilers do: local shapes, and the moves between placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from passes.cluster import Mesh
from passes.ir import Control, Graph, Node, Phase, TensorType, phase
from passes.memory.all_reduces import combined
from passes.memory.collectives import stepped
from passes.memory.compilers import compiler_of
from passes.memory.device_program import WHOLE, DeviceProgram, Interface
from passes.memory.dtype_widening import round_to, to_xla_widened
from passes.memory.gpu_orders import in_order
from passes.memory.gpu_pipelining import carried_on
from passes.memory.hoisting import hoisted
from passes.memory.lowering_rules import BARRIER, to_xla
from passes.memory.operations import Operation, Operations, Shape, widen
from passes.memory.pads_and_joins import joined_by_copies
from passes.memory.products import as_they_lie
from passes.placement import Layout, Pack, Placement, Resharding, ReshardingPlan, is_free, shared
from passes.rules import ShardingRule
from passes.sharding import ShardingSpec, Step, replicated

Around = Callable[[Operations, int, Control, Mapping[int, int], Sequence[TensorType], Sequence[int]], list[int]]
"""Adds a loop with what runs before and after it, given its index, what enters by its ports, the types of its results
and what it reads; returns its results."""


class Bodies(NamedTuple):
    """The `ranks` of the ports that the bodies of a control node read, in the order in which they do; a loop of which
    an iteration runs outside is added by `around`. What the ports `turned` stack lies in another order.
    """

    ranks: Mapping[int, int]
    around: Around | None = None
    turned: frozenset[int] = frozenset()


Inside = Callable[[int, Placement, Mapping[int, object]], Bodies]
"""The handler of a control node's bodies, given its index, its placement and the numbers that its ports hold."""


Rewrite = Callable[[Sequence[Operation], Sequence[int]], tuple[tuple[Operation, ...], tuple[int, ...]]]
"""Changes the operations of a program, given its outputs, before they are fused: the operations in a valid order, and
the new position of each old one."""


Summed = Callable[[Mesh, Step, Shape, str], bool]
"""Whether a compiler makes an all-reduce of a reduce-scatter that leaves each device a part of this shape and dtype."""


def never_summed(_mesh: Mesh, _step: Step, _part: Shape, _dtype: str) -> bool:
    """False: the answer of a compiler that keeps every reduce-scatter as it is."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The context in which a graph is lowered: its rules, its control nodes, the handler of their bodies, what
    rewrites its operations, the reduce-scatters that are `summed`, and whether loops send them in the next iteration.
    """

    rules: Sequence[ShardingRule]
    controls: Mapping[int, Control]
    mesh: Mesh
    inside: Inside
    rewrite: Rewrite = combined
    summed: Summed = never_summed
    pipelines: bool = False


def lower(
    graph: Graph, context: Context, layout: Layout, reshardings: ReshardingPlan, interface: Interface = WHOLE
) -> DeviceProgram:
    """The program of a graph, or of the body of a loop or branch."""
    layout = shared(layout)
    device = context.mesh.cluster.group().device
    lowering = Lowering(graph, context, reshardings.same, Operations(device.widened, compiler_of(device)))
    for position, (value, spec) in enumerate(zip(graph.inputs, layout.inputs, strict=True)):
        lowering.enter(value, spec, sliced=position in interface.sliced, number=interface.numbers.get(position))
    for value in graph.constants:
        lowering.enter(value, replicated(graph.types[value].rank))
    lowering.follow(layout, reshardings)
    lowering.bring(len(graph.nodes), reshardings.before[-1])
    read = (lowering.read(v, s, "forward") for v, s in zip(graph.outputs, layout.outputs, strict=True))
    outputs = [_written(lowering.operations, operation) for operation in read]
    for position in interface.stacked:
        outputs[position] = lowering.operations.add("update", (outputs[position],), (0,), "bool", ("stack", position))
    if interface.repeated:
        same = {lowering.entered[position] for position in interface.fixed}
        operations, moved = hoisted(lowering.operations, same, outputs)
    else:
        operations, moved = as_they_lie(lowering.operations.every, lowering.operations.lying, ()), []
    is_pipelined = context.pipelines and interface.repeated and not context.controls and not graph.constants
    stacked = interface.stacked if is_pipelined else ()
    operations, sent = carried_on(operations, outputs, stacked)
    outputs = [*(o + len(sent) for o in outputs), *((len(operations) - 1,) if sent else ())]
    operations, place = context.rewrite(operations, outputs)
    entered = [place[o + len(sent)] for o in lowering.entered]
    return DeviceProgram(
        operations=operations,
        inputs=(*entered[: len(graph.inputs)], *place[: len(sent)]),
        constants=tuple(entered[len(graph.inputs) :]),
        outputs=tuple(place[o] for o in outputs),
        hoisted=tuple(place[o + len(sent)] for o in moved),
        pending=tuple(sent),
    )


class Lowering:
    """The operations of every value, in the placement it is produced in and in those it was moved to."""

    def __init__(self, graph: Graph, context: Context, same: Mapping[int, int], operations: Operations) -> None:
        self.graph, self.context, self.same, self.operations = graph, context, same, operations
        self.home: dict[int, ShardingSpec] = {}
        self.made: dict[int, int] = {}
        self.moved: dict[tuple[int, ShardingSpec, Phase], int] = {}
        self.free: dict[int, int] = {}
        self.literals: dict[int, int] = {}
        self.turned: set[int] = set()
        self.entered: list[int] = []
        self.needed = _needed(graph)
        self.types: dict[tuple[int, int], tuple[TensorType, TensorType, ShardingSpec]] = {}
        self.local: dict[tuple[int, int], tuple[TensorType, ...]] = {}

    def _type(self, value: int, spec: ShardingSpec) -> TensorType:
        """The local type of a value on one device, cached with the type and spec, which equal layers share."""
        type = self.graph.types[value]
        cached = self.types.get((id(type), id(spec)))
        if cached is None:
            local = replace(type, shape=spec.local_shape(type.shape, self.context.mesh))
            cached = self.types[id(type), id(spec)] = (local, type, spec)
        return cached[0]

    def enter(self, value: int, spec: ShardingSpec, *, sliced: bool = False, number: object = None) -> None:
        """Adds a value from outside."""
        type = self._type(value, spec)
        self.operations.value, self.operations.is_fused = value, type.fused > 0
        entered = self.operations.add("input", (), type.shape, type.dtype, value)
        self.entered.append(entered)
        if number is not None:
            entered = self.operations.broadcast(self.operations.literal(number, type.dtype), type.shape, ())
        self.begin(value, spec, entered, sliced=sliced and number is None)

    def begin(self, value: int, spec: ShardingSpec, entered: int, *, sliced: bool = False) -> None:
        """Begins with a value that is there, or with a slice of it."""
        type = self._type(value, spec)
        if sliced:
            wide = widen(self.operations, entered)
            dtype = self.operations[wide].dtype
            entered = self.operations.add("rearrange", (wide,), type.shape, dtype, "dynamic-slice")
            entered = round_to(self.operations, entered, type.dtype)
        self.home[value], self.made[value] = spec, entered

    def follow(self, layout: Layout, reshardings: ReshardingPlan) -> None:
        """Makes everything but the last moves."""
        for index, placement in enumerate(layout.placements):
            if reshardings.before[index]:
                self.pack(index, reshardings.packs.get(index, ()))
                self.bring(index, reshardings.before[index])  # those that start early need about as much (0.98 to 1.02)
            if is_free(self.graph, index):
                self.free.update(dict.fromkeys(self.graph.nodes[index].outputs, index))
            else:
                self.run(index, placement)
        self.pack(len(self.graph.nodes), reshardings.packs.get(len(self.graph.nodes), ()))

    def pack(self, index: int, packs: Sequence[Pack]) -> None:
        """Makes the reductions of each pack as one, of an array in which they lie side by side."""
        operations, self.operations.at = self.operations, index
        for pack in packs:
            operations.value, operations.is_fused = pack.reductions[0].value, False
            made = [self.read(move.value, move.before, move.phase) for move in pack.reductions]
            wide = [widen(operations, o) for o in made]
            shape, dtype = (sum(operations[o].size for o in wide),), operations[wide[0]].dtype
            flat = [operations.reshape(o, (operations[o].size,)) for o in wide]
            total = joined_by_copies(operations, flat, shape, dtype, 0, len(flat))
            for step in pack.reductions[0].steps:
                total = widen(operations, total)
                total = round_to(operations, stepped(operations, total, step, shape, "add"), pack.types[0].dtype)
            for at, (move, o) in enumerate(zip(pack.reductions, wide, strict=True)):
                part = operations.add("rearrange", (total,), (operations[o].size,), pack.types[0].dtype, ("slice", at))
                self.moved[move.value, move.after, move.phase] = operations.reshape(part, operations[o].shape)

    def bring(self, index: int, reshardings: Sequence[Resharding]) -> None:
        """Makes moves that no pack has made, each from its value's home or from where that was reduced to."""
        self.operations.at = index
        for move in reshardings:
            if (move.value, move.after, move.phase) in self.moved:
                continue
            self.operations.value = move.value
            self.operations.is_fused = self.graph.types[move.value].fused > 0
            operation = self.read(move.value, move.before, move.phase)
            if move.after_value is not None:
                # What is behind a barrier is in the place of what was before it, so an argument is copied first.
                waited = (self.operations.copied(operation), self.made[move.after_value])
                operation, self.made[move.after_value] = self.operations.barrier(waited)
            self.moved[move.value, move.after, move.phase] = self._moved(operation, move)

    def _moved(self, operation: int, move: Resharding) -> int:
        spec, mesh = move.before, self.context.mesh
        for step in move.steps:
            spec = step.apply(spec)
            type = self._type(move.value, spec)
            number = self.operations.number(operation)
            if number is not None and (step.kind == "slice" or number == 0):
                operation = self.operations.broadcast(self.operations.literal(number, type.dtype), type.shape, ())
            else:
                wide = widen(self.operations, operation)
                dtype = self.operations[wide].dtype
                summed = step.kind == "reduce_scatter" and self.context.summed(mesh, step, type.shape, dtype)
                result = stepped(self.operations, wide, step, type.shape, move.before.reduction, summed=summed)
                operation = round_to(self.operations, result, type.dtype)
        return operation

    def read(self, value: int, spec: ShardingSpec, when: Phase) -> int:
        """The operation of a value in the placement that its reader needs; literals and free values exist in any."""
        if value in self.graph.literals:
            number, dtype = self.graph.literals[value], self.graph.types[value].dtype
            operation = self.literals[value] = self.operations.literal(number, dtype)
            return operation
        if value in self.free:
            return self._make(value, spec)
        if (home := self.home[value]) is spec or home == spec:
            return self.made[value]
        value = self.same.get(value, value)
        again = (value, spec, "backward")
        return self.moved[again] if when == "backward" and again in self.moved else self.moved[value, spec, "forward"]

    def _make(self, value: int, spec: ShardingSpec) -> int:
        type, node = self._type(value, spec), self.graph.nodes[self.free[value]]
        self.operations.is_fused = type.fused > 0
        (operation,) = to_xla(self.operations, node, [self.read(v, spec, "forward") for v in node.inputs], [type])
        return operation

    def run(self, index: int, placement: Placement) -> None:
        """Adds the operations of a node and keeps its results."""
        node, rule = self.graph.nodes[index], self.context.rules[index]
        self.operations.at = index
        if rule.alias:
            placed = zip(node.inputs, placement.operands, strict=True)
            operations = [self.read(v, spec, phase(node)) for v, spec in placed]
            if node.primitive == BARRIER:
                operations = self._held(node.outputs, operations)
        else:
            operands, results = self._operands(node, placement), self._results(node, rule, placement)
            self.operations.value = node.outputs[0] if node.outputs else -1
            self.operations.is_fused = any(type.fused for type in results)
            if placement.bodies and index in self.context.controls:
                operations = _controlled(self, index, placement, operands, results)
            else:
                operations = to_xla_widened(self.operations, node, operands, results)
        self.made.update(zip(node.outputs, operations, strict=True))
        self.home.update(zip(node.outputs, placement.results, strict=True))

    def _operands(self, node: Node, placement: Placement) -> list[int]:
        """The operations of a node's operands, in the placements that it needs."""
        home, operands = self.home, list[int]()
        for value, spec in zip(node.inputs, placement.operands, strict=True):
            if home.get(value) is spec:
                operands.append(self.made[value])
            elif value in self.literals:
                operands.append(self.literals[value])
            else:
                operands.append(self.read(value, spec, phase(node)))
        return operands

    def _results(self, node: Node, rule: ShardingRule, placement: Placement) -> tuple[TensorType, ...]:
        """The local types of a node's results, computed once for all nodes of equal rule and placement."""
        cached = self.local.get(key := (id(rule), id(placement)))
        if cached is None:
            cached = tuple([self._type(v, s) for v, s in zip(node.outputs, placement.results, strict=True)])
            self.local[key] = cached
        return cached

    def _held(self, outputs: Sequence[int], operations: list[int]) -> list[int]:
        """The operations that a barrier passes on; those that nothing needs are left out."""
        positions = [position for position, value in enumerate(outputs) if value in self.needed]
        passed = dict(
            zip(positions, self.operations.barrier([operations[position] for position in positions]), strict=True)
        )
        return [passed.get(position, operation) for position, operation in enumerate(operations)]


def _controlled(
    lowering: Lowering, index: int, placement: Placement, operands: Sequence[int], results: Sequence[TensorType]
) -> list[int]:
    """The results of a loop, which keeps its carries in place and has room for what it stacks, or of a branch."""
    control = lowering.context.controls[index]
    entering = {port_use.port: o for port_use, o in zip(control.operands, operands, strict=True)}
    read, bodies = _read_by_bodies(lowering, index, placement, entering)
    if bodies.around is not None:
        made = bodies.around(lowering.operations, index, control, entering, results, read)
    else:
        made = _looped(lowering, index, entering, results, read)
    lowering.turned.update(o for use, o in zip(control.results, made, strict=True) if use.port in bodies.turned)
    return made


def _looped(
    lowering: Lowering, index: int, entering: Mapping[int, int], results: Sequence[TensorType], read: Sequence[int]
) -> list[int]:
    """The results of a loop or branch."""
    control = lowering.context.controls[index]
    room = rooms(lowering.operations, index, control, entering, results)
    loop = lowering.operations.add("loop", (*read, *dict.fromkeys(room.values())), (0,), "bool", index)
    return [
        lowering.operations.add(
            "part" if position in room else "result",
            (room[position], loop) if position in room else (loop,),
            type.shape,
            type.dtype,
            lowering.operations[room[position]].tag if position in room else (index, position),
        )
        for position, type in enumerate(results)
    ]


def _read_by_bodies(
    lowering: Lowering, index: int, placement: Placement, entering: Mapping[int, int]
) -> tuple[list[int], Bodies]:
    """The operations that bodies read and do not change, in the order in which XLA lists them, and the bodies."""
    control = lowering.context.controls[index]
    fixed = {w.port for w in control.operands} - {w.port for w in control.results}
    constants = {s: n for s, o in entering.items() if s in fixed and (n := lowering.operations.number(o)) is not None}
    bodies = lowering.context.inside(index, placement, constants)
    ranks = bodies.ranks
    fixed -= constants.keys()
    # A whole stack is widened before the loop.
    reads = {
        use.port: widen(lowering.operations, entering[use.port]) if use.stacked else entering[use.port]
        for use in control.operands
        if use.port in fixed
    }
    # XLA lists what a loop does not change as its bodies come to it, less what only hoisted operations read.
    read = [reads[port] for port in sorted(reads.keys() & ranks.keys(), key=ranks.__getitem__)]
    read = [in_order(lowering.operations, o) if o in lowering.turned else o for o in read]
    lowering.operations.is_fused = False
    if before := [o for port, o in reads.items() if port not in ranks]:
        read.append(lowering.operations.add("opaque", before, (0,), "bool", ("hoisted", index)))
    return read, bodies


def _written(operations: Operations, operation: int) -> int:
    """The operation of a result: a literal has to be written somewhere."""
    written = operations.every[operation]
    if written.kind != "literal":
        return operation
    return operations.add("elementwise", (operation,), written.shape, written.dtype, "copy")


def rooms(
    operations: Operations, index: int, control: Control, entering: Mapping[int, int], results: Sequence[TensorType]
) -> dict[int, int]:
    """The room for each result that a loop carries or stacks, by position; the same values are stacked once.

    Reference: TryRemoveRepeatedWhileTupleIndices of XLA's WhileLoopSimplifier, as of jaxlib 0.10.
    """
    room: dict[int, int] = {}
    stacks: dict[tuple[int, Shape], int] = {}
    values = dict(zip(control.bodies[0].outputs, control.bodies[0].graph.outputs, strict=True))
    for position, (port_use, type) in enumerate(zip(control.results, results, strict=True)):
        operations.is_fused = type.fused > 0
        if port_use.port in entering:
            carried = (entering[port_use.port],)
            room[position] = operations.add("carry", carried, type.shape, type.dtype, (index, position))
        elif port_use.stacked:
            first = stacks.setdefault((values[port_use.port], type.shape), position)
            room[position] = operations.add("fresh", (), type.shape, type.dtype, (index, first))
    return room


def _needed(graph: Graph) -> set[int]:
    """The values that outputs depend on, through each barrier one by one."""
    needed = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.primitive == BARRIER:
            needed.update(v for v, result in zip(node.inputs, node.outputs, strict=True) if result in needed)
        elif not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
    return needed
