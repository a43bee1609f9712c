"""Segments of a stage's program, each run without waiting for another stage, as subgraphs; and the bytes that a stage
needs.

A stage runs a segment for each kind of task, and one when all microbatches are done (autopar/runtime/instructions.py).
Bytes are those of one device: what stays all the time, what a task works with, and what the end of a step needs, when
nothing is in flight any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.cluster import Mesh
from passes.ir import Graph, StatePairs
from passes.memory import PERSISTENT, peak
from passes.placement import Layout, ReshardingPlan, group, is_free, resharding_plan
from passes.sharding import Resharder, ShardingSpec
from passes.transforms import Part

PlacedValue = tuple[int, ShardingSpec]
"""A value in one placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """Some nodes of a graph as a program of its own; `nodes` are their indices in the graph, and `layout` has their
    placements.
    """

    graph: Graph
    nodes: tuple[int, ...]
    layout: Layout


def subgraph_of(
    graph: Graph, nodes: Iterable[int], layout: Layout, specs: Mapping[int, ShardingSpec], needed: Sequence[PlacedValue]
) -> Subgraph:
    """The part of a graph, made of these `nodes` alone, that computes the `needed` values from placements `specs`."""
    live, allowed = {v for v, _ in needed}, set(nodes)
    chosen: list[int] = []
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if (index in allowed or is_free(graph, index)) and not live.isdisjoint(node.outputs):
            chosen.append(index)
            live.update(node.inputs)
    picked = tuple(reversed(chosen))
    computed = {v for i in picked for v in graph.nodes[i].outputs}
    entering = sorted(v for v in live - computed if v not in graph.literals and v not in graph.constants)
    return Subgraph(
        graph=graph.part(picked, entering, [v for v, _ in needed]),
        nodes=picked,
        layout=Layout(
            inputs=tuple(specs[v] for v in entering),
            placements=tuple(layout.placements[i] for i in picked),
            outputs=tuple(spec for _, spec in needed),
        ),
    )


def value_specs(graph: Graph, layout: Layout) -> dict[int, ShardingSpec]:
    """The placement in which each value of a graph is made or comes in."""
    specs = dict(zip(graph.inputs, layout.inputs, strict=True))
    for node, placement in zip(graph.nodes, layout.placements, strict=True):
        specs |= zip(node.outputs, placement.results, strict=True)
    return specs


def reduced(
    graph: Graph, layout: Layout, reshardings: ReshardingPlan, nodes: Collection[int], later: Iterable[int]
) -> dict[int, ShardingSpec]:
    """The placements to which the segment of `nodes` reduces partial sums that `later` nodes read.

    They are handed on reduced: otherwise they would be reduced twice where the plan counts once. A segment reduces what
    its own nodes read, and what leaves the graph.
    """
    leaves = {v for v, spec in zip(graph.outputs, layout.outputs, strict=True) if not spec.partial}
    whole = leaves.intersection(v for i in nodes for v in graph.nodes[i].outputs)
    whole.update(value for value, spec in _operands(graph, layout, nodes) if not spec.partial)
    read_partial: dict[int, bool] = {}
    for value, spec in _operands(graph, layout, later):
        read_partial[value] = read_partial.get(value, False) or bool(spec.partial)
    first: dict[int, ShardingSpec] = {}
    for move in itertools.chain.from_iterable(reshardings.before):
        is_reduction = move.before.partial and not move.after.partial
        if is_reduction and move.value in whole and not read_partial.get(move.value, True):
            first.setdefault(move.value, move.after)
    return first


def _operands(graph: Graph, layout: Layout, nodes: Iterable[int]) -> Iterator[PlacedValue]:
    """The values that nodes read, in the placements in which they read them."""
    for i in nodes:
        yield from zip(graph.nodes[i].inputs, layout.placements[i].operands, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes of one device besides arguments, sums and what microbatches keep.

    `entering` are copies that the loop reads in place of arguments, which stay all the time; `working` is what a task
    needs while it runs; `finish` what the end of a step needs: results that replace no donated argument, and working
    space.
    """

    entering: int
    working: int
    finish: int


def needs(part: Part, layout: Layout, mesh: Mesh, state_pairs: StatePairs, donated: Sequence[bool]) -> Needs:
    """The bytes that a stage needs, given the positions of its state and which inputs are `donated`."""
    resharder = Resharder(mesh)
    return Needs(
        entering=entering(part, layout, mesh),
        working=_working(part, layout.placements[part.loop].bodies[0], mesh, resharder),
        finish=_finish(part, layout, mesh, resharder, {o for o, i in state_pairs if donated[i]}),
    )


def entering(part: Part, layout: Layout, mesh: Mesh) -> int:
    """Bytes on one device of the copies that a stage's loop reads in place of arguments with another placement."""
    graph = part.graph
    node, placement = graph.nodes[part.loop], layout.placements[part.loop]
    present = set(zip(graph.inputs, layout.inputs, strict=True))
    n_constants = part.scan.constants
    read = dict.fromkeys(zip(node.inputs[:n_constants], placement.operands[:n_constants], strict=True))
    fixed = {*graph.literals, *graph.constants}
    return sum(s.local_nbytes(graph.types[v], mesh) for v, s in read if (v, s) not in present and v not in fixed)


def _working(part: Part, inside: Layout, mesh: Mesh, resharder: Resharder) -> int:
    """Bytes that a task, the forward or the backward, needs besides what it reads and keeps."""
    body, n_constants, n_carries = part.body, part.scan.constants, part.scan.carries
    specs, ends = value_specs(body, inside), dict(zip(body.outputs, inside.outputs, strict=True))
    sums = dict(zip(body.outputs[:n_carries], body.inputs[n_constants:], strict=False))
    late = [i for i in range(len(body.nodes)) if i not in part.forward]
    kept = specs | reduced(body, inside, resharding_plan(body, inside, resharder), part.forward, late)
    read = {v for i in late for v in body.nodes[i].inputs}
    sizes: list[int] = []
    for nodes in (sorted(part.forward), late):
        computed = dict.fromkeys(v for i in nodes if not is_free(body, i) for v in body.nodes[i].outputs)
        saved: list[PlacedValue] = [(v, kept[v]) for v in computed if v in read and nodes is not late]
        sent: list[PlacedValue] = [(v, ends[v]) for v in computed if v in ends and (v, ends[v]) not in saved]
        entering_specs = kept if nodes is late else specs
        subgraph = subgraph_of(body, nodes, inside, entering_specs, [*saved, *sent])
        places = {v: i for i, v in enumerate(subgraph.graph.inputs)}
        state_pairs = tuple((o, places[sums[v]]) for o, (v, _) in enumerate((*saved, *sent)) if sums.get(v) in places)
        onward = [(v, spec) for v, spec in sent if v not in sums]
        sizes.append(
            _temporary(subgraph, mesh, resharder, state_pairs)
            + sum(spec.local_nbytes(body.types[v], mesh) for v, spec in onward)
        )
    return max(sizes)


def _finish(part: Part, layout: Layout, mesh: Mesh, resharder: Resharder, in_place: set[int]) -> int:
    graph, specs = part.graph, value_specs(part.graph, layout)
    outputs = list(zip(graph.outputs, layout.outputs, strict=True))
    needed = [(v, spec) for v, spec in outputs if v not in part.boundary_values]
    subgraph = subgraph_of(graph, range(part.loop + 1, len(graph.nodes)), layout, specs, needed)
    loop = set(graph.nodes[part.loop].outputs)  # a sum that is a result as it is has its room already
    new_nbytes = [
        spec.local_nbytes(graph.types[v], mesh)
        for o, (v, spec) in enumerate(outputs)
        if v not in part.boundary_values and o not in in_place and v not in loop
    ]
    return _temporary(subgraph, mesh, resharder, ()) + sum(new_nbytes)


def _temporary(subgraph: Subgraph, mesh: Mesh, resharder: Resharder, state_pairs: StatePairs) -> int:
    """Bytes of a subgraph besides its inputs and outputs."""
    graph = subgraph.graph
    if not graph.nodes:
        return 0
    reshardings = resharding_plan(graph, subgraph.layout, resharder)
    donated = (True,) * len(graph.inputs)
    memory = peak(graph, group(graph), mesh, subgraph.layout, reshardings, state_pairs, donated)
    return sum(nbytes for cause, nbytes in memory.nbytes.items() if cause not in (*PERSISTENT, "outputs"))
