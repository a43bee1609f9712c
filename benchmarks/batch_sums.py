"""The textbook's sums over the batch that are no gradients of parameters: a loss, a mean that normalises."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.causes import Program, Sent
from benchmarks.regions import Spot, Value, leaving
from benchmarks.verdicts import ROUNDING, Allowed, Finding, Verdict, seconds_of
from passes.ir import TensorType
from passes.sharding import ShardingSpec


def batch_sums(program: Program, sent: Sequence[Sent], verdict: Verdict) -> None:
    """Adds to the verdict one all-reduce for each sum over the batch, and what the plan's collectives take beyond.

    Collectives that finish some of the same sums are compared together with those sums.
    """
    groups: list[tuple[set[Spot], list[Sent]]] = []
    for s in sent:
        if s.kind not in ("all_reduce", "reduce_scatter"):
            verdict.findings.append(Finding(sent=s, surplus_seconds=s.seconds, why="sums are reduced, not gathered"))
            continue
        spots = set().union(*(origins(program, s.value, axis) for axis in s.axes))
        joined = [s]
        for group in [g for g in groups if g[0] & spots]:
            groups.remove(group)
            spots |= group[0]
            joined = [*group[1], *joined]
        groups.append((spots, joined))
    for spots, joined in groups:
        axes = tuple(dict.fromkeys(axis for s in joined for axis in s.axes))
        seconds, nbytes = 0.0, 0
        for spot in spots:
            type, spec, trips = _made(program, spot)
            local_nbytes = spec.local_nbytes(type, program.mesh)
            seconds += trips * seconds_of(program, "all_reduce", axes, local_nbytes)
            nbytes += trips * local_nbytes
        first = joined[0]
        verdict.allowed.append(
            Allowed(
                role="statistic",
                phase=first.phase,
                axes=axes,
                layer=first.layer,
                count=sum(_made(program, spot)[2] for spot in spots),
                nbytes=nbytes,
                wire=2 * nbytes,
                seconds=seconds,
            )
        )
        spent = sum(s.seconds for s in joined)
        if spent > seconds * ROUNDING:
            most = max(joined, key=lambda s: s.seconds)
            why = f"{sum(s.count for s in joined)} collectives finish {len(spots)} sums"
            verdict.findings.append(Finding(sent=most, surplus_seconds=spent - seconds, why=why))


def origins(program: Program, value: Value, axis: str) -> frozenset[Spot]:
    """The nodes whose partial sums over an axis a value carries on: those that first made it partial."""
    spots: set[Spot] = set()
    _add_origins(program, value, axis, set(), spots)
    return frozenset(spots)


def _add_origins(program: Program, value: Value, axis: str, seen: set[Value], spots: set[Spot]) -> None:
    if value in seen:
        return
    seen.add(value)
    region, v = program.regions[value[0]], value[1]
    producer = region.graph.producers.get(v)
    if producer is None:
        return
    node, placement = region.graph.nodes[producer], region.layout.placements[producer]
    if producer in region.controls:
        control, bodies = region.controls[producer]
        port = control.results[node.outputs.index(v)].port
        for inner, out in leaving(control, bodies, port):
            _add_origins(program, (inner.number, out), axis, seen, spots)
        return
    partial = [
        operand
        for operand, spec in zip(node.inputs, placement.operands, strict=True)
        if axis in spec.partial and operand in region.graph.producers
    ]
    if not partial:
        spots.add((region.number, producer))
    for operand in partial:
        _add_origins(program, (region.number, operand), axis, seen, spots)


def _made(program: Program, spot: Spot) -> tuple[TensorType, ShardingSpec, int]:
    """The type and placement of what a node makes, and how often a step."""
    region = program.regions[spot[0]]
    node = region.graph.nodes[spot[1]]
    return region.graph.types[node.outputs[0]], region.layout.placements[spot[1]].results[0], region.trips
