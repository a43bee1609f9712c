"""When values change placement: the reshardings that a choice of placements implies, in the order they run.

Lowering executes these moves and the plan lists their collectives, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.collectives import Collective, Kind
from passes.ir import Graph
from passes.mesh import Mesh
from passes.phases import Phase, phase
from passes.resharding import Resharder, Step
from passes.rules import rule_of
from passes.sharding import ShardingSpec, replicated

FREE = frozenset({"broadcast_in_dim", "iota"})
"""Primitives that, fed by literals alone, are computed in whatever placement their readers want."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the operands of one node must be and where its results come out."""

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]


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


def moves(
    graph: Graph,
    inputs: Sequence[ShardingSpec],
    placements: Sequence[Placement],
    outputs: Sequence[ShardingSpec],
    resharder: Resharder,
) -> tuple[tuple[Move, ...], ...]:
    """The moves before each node, [nodes + 1]; the last entry brings the outputs to their placements."""
    weights = frozenset(graph.inputs)
    home: dict[int, ShardingSpec] = dict(zip(graph.inputs, inputs, strict=True))
    home |= {value: replicated(graph.types[value].rank) for value in graph.constants}
    free: set[int] = set()
    done: set[tuple[int, ShardingSpec, Phase]] = set()
    backward: set[int] = set()

    def bring(value: int, wanted: ShardingSpec, when: Phase, anchor: int | None) -> Move | None:
        when = "backward" if when == "backward" and value in weights else "forward"
        if value in graph.literals or value in free or home[value] == wanted or (value, wanted, when) in done:
            return None
        done.add((value, wanted, when))
        steps = resharder.steps(graph.types[value], home[value], wanted)
        late = anchor if when == "backward" and not all(step.is_local for step in steps) else None
        return Move(value=value, before=home[value], after=wanted, steps=steps, phase=when, after_value=late)

    schedule: list[tuple[Move, ...]] = []
    for index, (node, placement) in enumerate(zip(graph.nodes, placements, strict=True)):
        if is_free(graph, index):
            free.update(node.outputs)
            schedule.append(())
            continue
        when = phase(node)
        anchor = next((value for value in node.inputs if value in backward), None)
        alias = rule_of(node, graph).alias
        wanted = [] if alias else list(zip(node.inputs, placement.operands, strict=True))
        schedule.append(tuple(m for value, spec in wanted if (m := bring(value, spec, when, anchor))))
        home.update(zip(node.outputs, placement.results, strict=True))
        if when == "backward":
            backward.update(node.outputs)
    brought = (bring(value, spec, "forward", None) for value, spec in zip(graph.outputs, outputs, strict=True))
    return (*schedule, tuple(m for m in brought if m))


def collectives(graph: Graph, schedule: Sequence[Sequence[Move]], mesh: Mesh) -> tuple[Collective, ...]:
    """Every collective of the schedule, equal ones of one source line counted together."""
    counted: dict[tuple[Kind, tuple[str, ...], str, int, str], int] = {}
    for index, before in enumerate(schedule):
        for move in before:
            spec = move.before
            type = graph.types[move.value]
            for step in move.steps:
                spec = step.apply(spec)
                if step.kind == "slice" or step.kind == "keep":
                    continue
                where = graph.nodes[index].source if index < len(graph.nodes) else "output"
                key = (step.kind, step.axes, type.dtype, spec.local_nbytes(type, mesh), where)
                counted[key] = counted.get(key, 0) + 1
    return tuple(
        Collective(kind=kind, axes=axes, dtype=dtype, nbytes=nbytes, count=count, where=where)
        for (kind, axes, dtype, nbytes, where), count in counted.items()
    )
