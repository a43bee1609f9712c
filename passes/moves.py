"""When values change placement: the reshardings that a choice of placements implies, in the order they run.

Lowering executes these moves and the plan lists their collectives, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from passes.collectives import Collective, Kind
from passes.control import control_of
from passes.ir import Graph, TensorType
from passes.mesh import Mesh
from passes.phases import Phase, phase
from passes.resharding import Step
from passes.rules import rule_of
from passes.sharding import ShardingSpec, replicated

FREE = frozenset({"broadcast_in_dim", "iota"})
"""Primitives that, fed by literals alone, are computed in whatever placement their readers want."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`value` goes from `before` to `after` by `steps`, just before the node that wants it first.

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
    """Whether a node is a broadcast or iota of literals, which costs nothing in any placement."""
    made = graph.nodes[node]
    return made.primitive in FREE and all(value in graph.literals for value in made.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The moves `before` each node, [nodes + 1], the last to bring the outputs where they belong; `bodies` by node."""

    before: tuple[tuple[Move, ...], ...]
    bodies: Mapping[int, tuple[Schedule, ...]] = field(default_factory=dict[int, "tuple[Schedule, ...]"])


class Steps(Protocol):
    """What knows the way from one placement of a value to another."""

    def steps(self, type: TensorType, before: ShardingSpec, after: ShardingSpec) -> tuple[Step, ...]: ...


def moves(graph: Graph, layout: Layout, resharder: Steps, *, refetch: bool = True) -> Schedule:
    """The moves that a layout implies; with `refetch`, weights are brought again for the backward pass."""
    weights = frozenset(graph.inputs)
    home: dict[int, ShardingSpec] = dict(zip(graph.inputs, layout.inputs, strict=True))
    home |= {value: replicated(graph.types[value].rank) for value in graph.constants}
    free: set[int] = set()
    done: set[tuple[int, ShardingSpec, Phase]] = set()
    backward: set[int] = set()

    def bring(value: int, wanted: ShardingSpec, when: Phase, anchor: int | None) -> Move | None:
        when = "backward" if refetch and when == "backward" and value in weights else "forward"
        if value in graph.literals or value in free or home[value] == wanted or (value, wanted, when) in done:
            return None
        done.add((value, wanted, when))
        steps = resharder.steps(graph.types[value], home[value], wanted)
        late = anchor if when == "backward" and not all(step.is_local for step in steps) else None
        return Move(value=value, before=home[value], after=wanted, steps=steps, phase=when, after_value=late)

    schedule: list[tuple[Move, ...]] = []
    bodies: dict[int, tuple[Schedule, ...]] = {}
    for index, (node, placement) in enumerate(zip(graph.nodes, layout.placements, strict=True)):
        if is_free(graph, index):
            free.update(node.outputs)
            schedule.append(())
            continue
        when = phase(node)
        anchor = next((value for value in node.inputs if value in backward), None)
        if placement.bodies:
            inner = zip(node.subgraphs, placement.bodies, strict=True)
            bodies[index] = tuple(moves(body, inside, resharder, refetch=refetch) for body, inside in inner)
        operands = zip(node.inputs, placement.operands, strict=True)
        wanted = [(value, spec) for value, spec in operands if home.get(value, spec) != spec]
        if wanted and rule_of(node, graph).alias:
            wanted = []
        schedule.append(tuple(m for value, spec in wanted if (m := bring(value, spec, when, anchor))))
        home.update(zip(node.outputs, placement.results, strict=True))
        if when == "backward":
            backward.update(node.outputs)
    brought = (bring(value, spec, "forward", None) for value, spec in zip(graph.outputs, layout.outputs, strict=True))
    return Schedule(before=(*schedule, tuple(m for m in brought if m)), bodies=bodies)


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
