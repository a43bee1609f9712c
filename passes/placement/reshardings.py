"""When values change placement: the reshardings that a choice of placements implies, in the order they run.

Lowering executes these moves and the plan lists their collectives, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from passes.cluster import Collective, Kind, Mesh
from passes.gc_pause import uncollected
from passes.ir import Graph, Node, Phase, TensorType, control_of, phase
from passes.rules import made_anywhere, makes_the_same, rule_of
from passes.sharding import ShardingSpec, Step, replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the operands of one node must be and where its results come out; a loop's or branch's bodies beside it."""

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    bodies: tuple[Layout, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything in a graph is: its inputs, one placement a node, and its outputs."""

    inputs: tuple[ShardingSpec, ...]
    placements: tuple[Placement, ...]
    outputs: tuple[ShardingSpec, ...]


def shared(layout: Layout) -> Layout:
    """The same layout, its equal specs and placements the same objects, which need no comparing."""
    specs: dict[ShardingSpec, ShardingSpec] = {}
    placements: dict[tuple[object, ...], Placement] = {}
    known = {id(placement): placement for placement in layout.placements}
    for key, placement in known.items():
        operands, results = (
            tuple([specs.setdefault(spec, spec) for spec in side]) for side in (placement.operands, placement.results)
        )
        same = (*map(id, operands), None, *map(id, results), *map(id, placement.bodies))
        if same not in placements:
            placements[same] = Placement(operands=operands, results=results, bodies=placement.bodies)
        known[key] = placements[same]
    return Layout(
        inputs=tuple([specs.setdefault(spec, spec) for spec in layout.inputs]),
        placements=tuple([known[id(placement)] for placement in layout.placements]),
        outputs=tuple([specs.setdefault(spec, spec) for spec in layout.outputs]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`value` goes from `before` to `after` by `steps`, just before the node that wants it first.

    `before` is where the value is made or, of one that is made partial, where it was reduced to.

    `after_value` is a value that must exist before the move starts: it keeps a weight gathered for the backward pass
    from being gathered early, in the forward pass (ZeRO-3's second gather).
    """

    value: int
    before: ShardingSpec
    after: ShardingSpec
    steps: tuple[Step, ...]
    phase: Phase
    after_value: int | None = None


def is_free(graph: Graph, node: int) -> bool:
    """Whether a node is, like a broadcast of literals, made in whatever placement its readers want, at no cost."""
    made = graph.nodes[node]
    return made_anywhere(made) and all(value in graph.literals for value in made.inputs)


def weights(graph: Graph) -> frozenset[int]:
    """The inputs, and what the forward pass makes of one of them alone in its size: a weight that is cast, say.

    The backward pass may bring them anew.
    """
    found = set(graph.inputs)
    for node in graph.nodes:
        arrays = [v for v in node.inputs if v not in graph.literals]
        if len(arrays) != 1 or len(node.outputs) != 1 or arrays[0] not in found or phase(node) == "backward":
            continue
        made = node.outputs[0]
        if graph.types[made].size == graph.types[arrays[0]].size and rule_of(node, graph).light:
            found.add(made)
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The moves `before` each node, [nodes + 1], the last to bring the outputs where they belong; `bodies` by node.

    Values that are computed twice move once: `same` has the one that moves for each that does not.
    """

    before: tuple[tuple[Move, ...], ...]
    bodies: Mapping[int, tuple[Schedule, ...]] = field(default_factory=dict[int, "tuple[Schedule, ...]"])
    same: Mapping[int, int] = field(default_factory=dict[int, int])


class Steps(Protocol):
    """What knows the way from one placement of a value to another."""

    def steps(self, type: TensorType, before: ShardingSpec, after: ShardingSpec) -> tuple[Step, ...]: ...


@uncollected()
def moves(graph: Graph, layout: Layout, resharder: Steps, *, refetch: bool = True) -> Schedule:
    """The moves that a layout implies; with `refetch`, weights are brought again for the backward pass."""
    return _Moving(graph, shared(layout), resharder, refetch).run()


class _Moving:
    """Where every value is as nodes run: at `home`, or nowhere for those that are `free`; `done` are moves made.

    Of values that are partial at home, `reduced` says where the first reduction left them: there is no second.
    """

    def __init__(self, graph: Graph, layout: Layout, resharder: Steps, refetch: bool) -> None:
        self.graph, self.layout, self.resharder, self.refetch = graph, layout, resharder, refetch
        self.weights = weights(graph) if refetch else frozenset[int]()
        self.home: dict[int, ShardingSpec] = dict(zip(graph.inputs, layout.inputs, strict=True))
        self.home |= {value: replicated(graph.types[value].rank) for value in graph.constants}
        self.free: set[int] = set()
        self.done: set[tuple[int, ShardingSpec, Phase]] = set()
        self.reduced: dict[int, ShardingSpec] = {}
        self.backward: set[int] = set()
        self.known: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.same: dict[int, int] = {}

    def run(self) -> Schedule:
        graph, layout, home = self.graph, self.layout, self.home
        schedule: list[tuple[Move, ...]] = []
        bodies: dict[int, tuple[Schedule, ...]] = {}
        for index, (node, placement) in enumerate(zip(graph.nodes, layout.placements, strict=True)):
            if is_free(graph, index):
                self.free.update(node.outputs)
                schedule.append(())
                continue
            if placement.bodies:
                inner = zip(node.subgraphs, placement.bodies, strict=True)
                bodies[index] = tuple(
                    moves(body, inside, self.resharder, refetch=self.refetch) for body, inside in inner
                )
            wanted = [
                (value, spec)
                for value, spec in zip(node.inputs, placement.operands, strict=True)
                if (at := home.get(value, spec)) is not spec and at != spec
            ]
            schedule.append(self._before(node, wanted) if wanted else ())
            for value, spec in zip(node.outputs, placement.results, strict=True):
                home[value] = spec
            self._recognise(node, placement)
            if self.refetch and phase(node) == "backward":
                self.backward.update(node.outputs)
        leaving = zip(graph.outputs, layout.outputs, strict=True)
        brought = (self._bring(value, spec, "forward", None) for value, spec in leaving)
        return Schedule(before=(*schedule, tuple(m for m in brought if m)), bodies=bodies, same=self.same)

    def _recognise(self, node: Node, placement: Placement) -> None:
        """Notes whether a node makes what another one made before it, in the same placement: XLA computes that once.

        Equal parameters and placements are the same objects in almost every graph, so it is those that are compared.
        """
        operands = tuple([self.same.get(value, value) for value in node.inputs])
        key = (node.primitive, id(node.params), id(placement), operands)
        first = self.known.setdefault(key, node.outputs)
        if first is not node.outputs and makes_the_same(node):
            self.same.update(zip(node.outputs, first, strict=True))

    def _before(self, node: Node, wanted: Sequence[tuple[int, ShardingSpec]]) -> tuple[Move, ...]:
        """The moves that a node waits for."""
        when = phase(node)
        anchor = next((value for value in node.inputs if value in self.backward), None)
        return tuple(move for value, spec in wanted if (move := self._bring(value, spec, when, anchor)))

    def _bring(self, value: int, wanted: ShardingSpec, when: Phase, anchor: int | None) -> Move | None:
        when = "backward" if self.refetch and when == "backward" and value in self.weights else "forward"
        value = self.same.get(value, value)
        if value in self.graph.literals or value in self.free:
            return None
        home = self.home[value]
        if home == wanted or (value, wanted, when) in self.done:
            return None
        self.done.add((value, wanted, when))
        if home.partial:
            home = self.reduced.get(value, home)
            if not wanted.partial:
                self.reduced.setdefault(value, wanted)
        steps = self.resharder.steps(self.graph.types[value], home, wanted)
        late = anchor if when == "backward" and not all(step.is_local for step in steps) else None
        return Move(value=value, before=home, after=wanted, steps=steps, phase=when, after_value=late)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A move at its place: of `type`, before the node at the source line `where`.

    It is made `trips` times a step, each time with probability `share`, in the node's `phase`.
    """

    move: Move
    type: TensorType
    where: str
    phase: Phase
    trips: int = 1
    share: float = 1.0


def due(graph: Graph, schedule: Schedule, *, trips: int = 1, share: float = 1.0, end: str = "output") -> Iterator[Due]:
    """Every move of a schedule, those of loops and branches included; `end` is where the outputs leave."""
    for index, before in enumerate(schedule.before):
        if not before and index not in schedule.bodies:
            continue
        node = graph.nodes[index] if index < len(graph.nodes) else None
        where, when = (node.source, phase(node)) if node else (end, "apply")
        for move in before:
            yield Due(move=move, type=graph.types[move.value], where=where, phase=when, trips=trips, share=share)
        control = control_of(node, graph) if node and index in schedule.bodies else None
        if control:
            for body, inner in zip(control.bodies, schedule.bodies[index], strict=True):
                inside, chance = trips * body.trips, share * body.share
                yield from due(body.graph, inner, trips=inside, share=chance, end=where)


def collectives(graph: Graph, schedule: Schedule, mesh: Mesh) -> tuple[Collective, ...]:
    """Every collective of the schedule, equal ones of one source line counted together, as often as loops run them."""
    counted: dict[tuple[Kind, tuple[str, ...], str, int, str], int] = {}
    for one in due(graph, schedule):
        spec = one.move.before
        for step in one.move.steps:
            spec = step.apply(spec)
            if step.kind == "slice" or step.kind == "keep":
                continue
            key = (step.kind, step.axes, one.type.dtype, spec.local_nbytes(one.type, mesh), one.where)
            counted[key] = counted.get(key, 0) + one.trips
    return tuple(
        Collective(kind=kind, axes=axes, dtype=dtype, nbytes=nbytes, count=count, where=where)
        for (kind, axes, dtype, nbytes, where), count in counted.items()
    )
