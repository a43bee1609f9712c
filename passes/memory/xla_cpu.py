"""What XLA's CPU compiler makes of a planned program, as far as memory goes.

The plan is followed to what the compiler makes of it, and that is where the accuracy comes from:

    lower      the graph on local shapes, moves included, in XLA's own operations      passes/memory/device_program.py
    combine    all-reduces that do not wait for each other are one                     passes/memory/all_reduces.py
    fuse       which results are ever written to memory                                passes/memory/fusion.py
    run        kernels breadth first; each result lives until its last reader          passes/memory/liveness.py
    count      the busiest moment, the bodies of loops at theirs                       here
    pack       the gaps that are left where buffers come and go                        passes/memory/packing.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.cluster import Mesh
from passes.ir import Graph, Phase
from passes.memory.device_program import WHOLE, Border, Context, DeviceProgram, border_of, lower
from passes.memory.fusion import fuse
from passes.memory.holders import Holder, Temporaries, phase_of
from passes.memory.liveness import Buffer, Lifetimes, lifetimes
from passes.memory.packing import Span, gaps_nbytes
from passes.placement import Grouping, Layout, Placement, Schedule


def temporaries(graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, schedule: Schedule) -> Temporaries:
    """What the compiled step needs beside arguments and outputs."""
    found = _Region(graph, grouping, mesh, layout, schedule).peak()
    return Temporaries(
        where=found.where,
        holders=found.holders,
        gaps_nbytes=gaps_nbytes(found.spans),
        over_time=found.over_time,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The busiest moment of a region: everything that is live then, and live bytes over time, [kernels].

    `spans` are all its buffers, those of loops inside included, over so many `moments`.
    """

    where: str
    holders: tuple[Holder, ...]
    over_time: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    moments: int = 1

    @property
    def nbytes(self) -> int:
        return sum(holder.nbytes for holder in self.holders)


class _Region:
    """A graph, or a body of one of its loops and branches, and the peaks inside those as they are found."""

    def __init__(self, graph: Graph, grouping: Grouping, mesh: Mesh, layout: Layout, schedule: Schedule) -> None:
        self.graph, self.grouping, self.mesh = graph, grouping, mesh
        self.layout, self.schedule = layout, schedule
        self.input_names = dict(zip(graph.inputs, graph.input_names, strict=False))
        self.inside: dict[int, Peak] = {}
        self.phases: list[Phase] = [phase_of(node) for node in graph.nodes]

    def peak(self, border: Border = WHOLE) -> Peak:
        """The busiest moment; a body is told how it hangs on what is around it."""
        context = Context(
            rules=self.grouping.rules, controls=self.grouping.controls, mesh=self.mesh, inside=self._inside
        )
        program = lower(self.graph, context, self.layout, self.schedule, border)
        found = lifetimes(program, fuse(program.operations, program.outputs), border.carried)
        inside = {
            o: self.inside[operation.node].nbytes
            for o, operation in enumerate(program.operations)
            if operation.kind == "loop"
        }
        over_time = found.nbytes(inside)
        if not over_time:
            return Peak(where="", holders=(), over_time=())
        return self._at(program, found, over_time)

    def _at(self, program: DeviceProgram, found: Lifetimes, over_time: Sequence[int]) -> Peak:
        """What is live at the busiest moment; what a loop does not repeat is, all the while."""
        at = max(range(len(over_time)), key=over_time.__getitem__)
        running = program.operations[found.order[at]]
        within = self.inside[running.node] if running.kind == "loop" else None
        once = [
            Holder(name=self._name(o.value), nbytes=o.nbytes, cause="collective buffers")
            for o in (program.operations[h] for h in program.hoisted)
        ]
        live = [self._holder(program, found, b) for b in found.buffers if b.first <= at <= b.last]
        where = self.graph.nodes[running.node].source if 0 <= running.node < len(self.graph.nodes) else ""
        spans, moments = self._spans(program, found)
        whole = (Span(holder.nbytes, 0, moments - 1) for holder in once)
        return Peak(
            where=within.where if within and within.where else where,
            holders=(*once, *live, *(within.holders if within else ())),
            over_time=tuple(total + sum(holder.nbytes for holder in once) for total in over_time),
            spans=(*whole, *spans),
            moments=moments,
        )

    def _spans(self, program: DeviceProgram, found: Lifetimes) -> tuple[list[Span], int]:
        """Every buffer, while a loop runs those of its busiest body too, and how many moments that takes in all."""
        begins, inner, moment = list[int](), list[Span](), 0
        for o in found.order:
            begins.append(moment)
            running = program.operations[o]
            within = self.inside[running.node] if running.kind == "loop" else None
            inner.extend(Span(s.nbytes, s.first + moment, s.last + moment) for s in (within.spans if within else ()))
            moment += within.moments if within else 1
        begins.append(moment)
        own = [Span(b.nbytes, begins[b.first], begins[b.last + 1] - 1) for b in found.buffers]
        return [*own, *inner], moment

    def _holder(self, program: DeviceProgram, found: Lifetimes, buffer: Buffer) -> Holder:
        """A buffer by name and cause."""
        made = [program.operations[o] for o in buffer.operations]
        readers = {self._when(program.operations[r].node) for o in buffer.operations for r in found.readers.get(o, ())}
        written = {self._when(self.graph.producers.get(o.value, o.node)) for o in made}
        collective = any(o.kind in ("collective", "result") for o in made)
        if "backward" in written and "apply" in readers:
            cause = "gradients"
        elif collective:
            cause = "collective buffers"
        elif "forward" in written and "backward" in readers:
            cause = "saved for backward"
        else:
            cause = "transients"
        return Holder(name=self._name(made[-1].value), nbytes=buffer.nbytes, cause=cause)

    def _when(self, node: int) -> Phase:
        return self.phases[node] if 0 <= node < len(self.phases) else "apply"

    def _name(self, value: int) -> str:
        """A value by its input name, or by what made it."""
        if value in self.input_names:
            return self.input_names[value]
        return _maker(self.graph, value)

    def _inside(self, index: int, placement: Placement, known: Mapping[int, object]) -> None:
        """Finds the peak of a control node's busiest body."""
        control = self.grouping.controls[index]
        bodies = zip(
            control.bodies, self.grouping.bodies[index], placement.bodies, self.schedule.bodies[index], strict=True
        )
        peaks = [
            _Region(body.graph, grouping, self.mesh, layout, schedule).peak(border_of(body, control, known))
            for body, grouping, layout, schedule in bodies
        ]
        self.inside[index] = max(peaks, key=lambda peak: peak.nbytes)


def _maker(graph: Graph, value: int) -> str:
    """The primitive and the source line that made a value."""
    if value not in graph.producers:
        return "constant"
    node = graph.nodes[graph.producers[value]]
    return f"{node.primitive} at {node.source}" if node.source else node.primitive
