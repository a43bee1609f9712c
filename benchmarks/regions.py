"""The graphs of a planned program, bodies of loops and branches included, and what reaches their values.

`spread` finds the batch dimensions of values and `depend` the inputs that they depend on; `benchmarks.causes` derives
the roles of values from both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.ir import Control, Graph, control_of
from passes.placement import Background, Layout, ReshardingPlan
from passes.rules import rule_of

Value = tuple[int, int]
"""(number of the region, value): a value of the program or of a loop's or branch's body."""

Spot = tuple[int, int]
"""(number of the region, node)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """A graph under a plan, with its loops and branches by node; a step runs it `trips` times with probability `share`.

    `end` names the place behind the last node, for what moves its outputs.
    """

    number: int
    graph: Graph
    layout: Layout
    reshardings: ReshardingPlan
    background: Background
    trips: int
    share: float
    end: str
    controls: Mapping[int, tuple[Control, tuple[Region, ...]]]

    def all(self) -> Iterator[Region]:
        """This region and those inside it, inner ones at their place."""
        yield self
        for _, bodies in self.controls.values():
            for body in bodies:
                yield from body.all()


def placed(
    background: Background,
    layout: Layout,
    reshardings: ReshardingPlan,
    trips: int,
    share: float,
    end: str,
    numbers: Iterator[int],
) -> Region:
    """The region of a graph under its `layout`, with the regions of its loops and branches.

    `numbers` yields the number of this region and then of those inside it; the rest as in `Region`.
    """
    graph, number = background.graph, next(numbers)
    controls: dict[int, tuple[Control, tuple[Region, ...]]] = {}
    for index, inner in reshardings.bodies.items():
        node = graph.nodes[index]
        control = control_of(node, graph)
        if control is None:
            continue
        within = background.inside(index, control)
        pairs = zip(control.bodies, within, layout.placements[index].bodies, inner, strict=True)
        controls[index] = (
            control,
            tuple(
                placed(beside, at, moved, trips * body.trips, share * body.share, node.source, numbers)
                for body, beside, at, moved in pairs
            ),
        )
    return Region(
        number=number,
        graph=graph,
        layout=layout,
        reshardings=reshardings,
        background=background,
        trips=trips,
        share=share,
        end=end,
        controls=controls,
    )


def leaving(control: Control, bodies: Sequence[Region], port: int) -> Iterator[tuple[Region, int]]:
    """The body regions' outputs that a loop or branch carries out through a port."""
    for body, inner in zip(control.bodies, bodies, strict=True):
        for value, left_by in zip(body.graph.outputs, body.outputs, strict=True):
            if left_by == port:
                yield inner, value


def entering(control: Control, bodies: Sequence[Region], port: int) -> Iterator[tuple[Region, int]]:
    """The body regions' inputs that a loop or branch brings in through a port."""
    for body, inner in zip(control.bodies, bodies, strict=True):
        for value, entered_by in zip(body.graph.inputs, body.inputs, strict=True):
            if entered_by == port:
                yield inner, value


def _port_uses(region: Region, index: int) -> Iterator[tuple[Value, int, int]]:
    """(value, port, dimensions that the value has in front of the port's) of the values at a control's ports."""
    control, bodies = region.controls[index]
    node = region.graph.nodes[index]
    for values, port_uses in ((node.inputs, control.operands), (node.outputs, control.results)):
        for value, port_use in zip(values, port_uses, strict=True):
            yield (region.number, value), port_use.port, int(port_use.stacked)
    for port in range(len(control.ports)):
        for inner, value in (*entering(control, bodies, port), *leaving(control, bodies, port)):
            yield (inner.number, value), port, 0


def spread(region: Region, dims_of: dict[Value, set[int]]) -> None:
    """Adds to `dims_of` the batch dimensions that one pass over a region's nodes finds, along shared factors."""
    graph, here = region.graph, region.number
    for index, node in enumerate(graph.nodes):
        if index in region.controls:
            port_uses = list(_port_uses(region, index))
            ports: dict[int, set[int]] = defaultdict(set)
            for value, port, shift in port_uses:
                ports[port] |= {d - shift for d in dims_of.get(value, ()) if d >= shift}
            for value, port, shift in port_uses:
                if ports[port]:
                    dims_of[value] |= {d + shift for d in ports[port]}
            continue
        rule = rule_of(node, graph)
        if rule.alias:
            for value, result in zip(node.inputs, node.outputs, strict=True):
                if (here, value) in dims_of:
                    dims_of[here, result] |= dims_of[here, value]
            continue
        sides = (*zip(node.inputs, rule.operands, strict=True), *zip(node.outputs, rule.results, strict=True))
        cut = {f for v, factors in sides for d in dims_of.get((here, v), ()) if (f := factors[d]) >= 0}
        for value, factors in sides if cut else ():
            if value not in graph.literals and (dims := {d for d, f in enumerate(factors) if f in cut}):
                dims_of[here, value] |= dims


def depend(region: Region, masks: dict[Value, int]) -> None:
    """Adds to `masks` the inputs, as bits by position, that one pass over a region's nodes finds for each value."""
    here, graph = region.number, region.graph
    for index, node in enumerate(graph.nodes):
        if index in region.controls:
            _through(region, index, masks)
            continue
        if rule_of(node, graph).alias:
            for value, result in zip(node.inputs, node.outputs, strict=True):
                masks[here, result] = masks.get((here, value), 0)
            continue
        bits = 0
        for value in node.inputs:
            bits |= masks.get((here, value), 0)
        for value in node.outputs:
            masks[here, value] = bits


def _through(region: Region, index: int, masks: dict[Value, int]) -> None:
    control, bodies = region.controls[index]
    node, ports = region.graph.nodes[index], defaultdict[int, int](int)
    for value, port_use in zip(node.inputs, control.operands, strict=True):
        ports[port_use.port] |= masks.get((region.number, value), 0)
    for port in range(len(control.ports)):
        for inner, value in leaving(control, bodies, port):
            ports[port] |= masks.get((inner.number, value), 0)
        for inner, value in entering(control, bodies, port):
            masks[inner.number, value] = ports[port]
    for value, port_use in zip(node.outputs, control.results, strict=True):
        masks[region.number, value] = ports[port_use.port]
