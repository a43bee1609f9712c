"""The graphs of a program as placed, loops and branches included, and what flows through them.

What a value is follows from the inputs that it depends on and from the dimension that the batch is on: both are found
on the program alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.ir import Control, Graph, control_of
from passes.placement import Layout, ReshardingPlan
from passes.rules import rule_of

Value = tuple[int, int]
"""(number of the region, value): a value of the program or of a loop's or branch's body."""

Spot = tuple[int, int]
"""(number of the region, node)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """A graph as placed, with its loops and branches by node; it runs `trips` times with probability `share`."""

    number: int
    graph: Graph
    layout: Layout
    reshardings: ReshardingPlan
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


def placed(
    graph: Graph, layout: Layout, reshardings: ReshardingPlan, trips: int, share: float, end: str, numbers: list[int]
) -> Region:
    number, numbers[0] = numbers[0], numbers[0] + 1
    joints: dict[int, tuple[Control, tuple[Region, ...]]] = {}
    for index, inner in reshardings.bodies.items():
        node = graph.nodes[index]
        control = control_of(node, graph)
        if control is None:
            continue
        pairs = zip(control.bodies, layout.placements[index].bodies, inner, strict=True)
        joints[index] = (
            control,
            tuple(
                placed(body.graph, at, moved, trips * body.trips, share * body.share, node.source, numbers)
                for body, at, moved in pairs
            ),
        )
    return Region(
        number=number,
        graph=graph,
        layout=layout,
        reshardings=reshardings,
        trips=trips,
        share=share,
        end=end,
        joints=joints,
    )


def leaving(control: Control, bodies: Sequence[Region], slot: int) -> Iterator[tuple[Region, int]]:
    """The values of bodies that leave through a slot."""
    for body, inner in zip(control.bodies, bodies, strict=True):
        for value, port in zip(body.graph.outputs, body.outputs, strict=True):
            if port == slot:
                yield inner, value


def entering(control: Control, bodies: Sequence[Region], slot: int) -> Iterator[tuple[Region, int]]:
    """The values of bodies that enter through a slot."""
    for body, inner in zip(control.bodies, bodies, strict=True):
        for value, port in zip(body.graph.inputs, body.inputs, strict=True):
            if port == slot:
                yield inner, value


def _wires(region: Region, index: int) -> Iterator[tuple[Value, int, int]]:
    """(value, slot, dimensions in front of the slot's) of all that hangs on the slots of a loop or branch."""
    control, bodies = region.joints[index]
    node = region.graph.nodes[index]
    for values, wires in ((node.inputs, control.operands), (node.outputs, control.results)):
        for value, wire in zip(values, wires, strict=True):
            yield (region.number, value), wire.slot, int(wire.stacked)
    for slot in range(len(control.slots)):
        for inner, value in (*entering(control, bodies, slot), *leaving(control, bodies, slot)):
            yield (inner.number, value), slot, 0


def spread(region: Region, dims_of: dict[Value, set[int]]) -> None:
    """Adds the batch's dimensions that one pass over a region's nodes reaches."""
    graph, here = region.graph, region.number
    for index, node in enumerate(graph.nodes):
        if index in region.joints:
            wires = list(_wires(region, index))
            slots: dict[int, set[int]] = defaultdict(set)
            for value, slot, shift in wires:
                slots[slot] |= {d - shift for d in dims_of.get(value, ()) if d >= shift}
            for value, slot, shift in wires:
                if slots[slot]:
                    dims_of[value] |= {d + shift for d in slots[slot]}
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
    """Adds what one pass over a region's nodes finds that values depend on."""
    here, graph = region.number, region.graph
    for index, node in enumerate(graph.nodes):
        if index in region.joints:
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
    control, bodies = region.joints[index]
    node, slots = region.graph.nodes[index], defaultdict[int, int](int)
    for value, wire in zip(node.inputs, control.operands, strict=True):
        slots[wire.slot] |= masks.get((region.number, value), 0)
    for slot in range(len(control.slots)):
        for inner, value in leaving(control, bodies, slot):
            slots[slot] |= masks.get((inner.number, value), 0)
        for inner, value in entering(control, bodies, slot):
            masks[inner.number, value] = slots[slot]
    for value, wire in zip(node.outputs, control.results, strict=True):
        masks[region.number, value] = slots[wire.slot]
