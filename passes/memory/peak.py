"""Peak bytes of one device under a plan, by cause: where the peak is, what holds it, and bytes over the whole step.

The plan is followed to what XLA's CPU compiler makes of it, and that is where the accuracy comes from:

    lower      the graph on local shapes, moves included, in XLA's own operations      passes/memory/device_program.py
    combine    all-reduces that do not wait for each other are one                     passes/memory/all_reduces.py
    fuse       which results are ever written to memory                                passes/memory/fusion.py
    run        kernels breadth first; each result lives until its last reader          passes/memory/liveness.py
    count      the busiest moment, the bodies of loops at theirs                       here
    pack       the gaps that are left where buffers come and go                        passes/memory/packing.py

Arguments and outputs stay for the whole step; outputs that replace donated arguments take no room. An accelerator's
compiler schedules and fuses otherwise: what persists is exact there too, the rest is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from passes.cluster import Mesh
from passes.gc_pause import uncollected
from passes.ir import Graph, Node, Phase, StatePairs, phase
from passes.memory.device_program import WHOLE, Border, Context, DeviceProgram, border_of, lower
from passes.memory.fusion import fuse
from passes.memory.liveness import Buffer, Lifetimes, lifetimes
from passes.memory.packing import Span, gaps_nbytes
from passes.placement import Grouping, Layout, Placement, Schedule

CAUSES = (
    "parameters",
    "optimizer state",
    "other arguments",
    "outputs",
    "gradients",
    "saved for backward",
    "collective buffers",
    "transients",
)
PERSISTENT = CAUSES[:3]
HOLDERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """An array at the peak: an input by its name, anything else by its primitive and source line."""

    name: str
    nbytes: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one device: at the peak by cause, `where` it is, its largest `holders`, and `over_time`, [kernels]."""

    nbytes: Mapping[str, int]
    where: str
    holders: tuple[Holder, ...]
    over_time: tuple[int, ...]

    @property
    def peak_nbytes(self) -> int:
        """All causes together."""
        return sum(self.nbytes.values())


@uncollected()
def memory(
    graph: Graph,
    grouping: Grouping,
    mesh: Mesh,
    layout: Layout,
    schedule: Schedule,
    state_pairs: StatePairs,
    donated: Sequence[bool],
) -> Memory:
    """What a plan needs on one device; `state_pairs` are the (output, input) positions of its state."""
    forward = _read_forward(graph, grouping)
    state = {i for _, i in state_pairs}
    held: list[Holder] = []
    for position, (value, spec) in enumerate(zip(graph.inputs, layout.inputs, strict=True)):
        cause = "other arguments"
        if position in state:
            cause = "parameters" if value in forward else "optimizer state"
        name = graph.input_names[position] if graph.input_names else f"argument {position}"
        held.append(Holder(name=name, nbytes=spec.local_nbytes(graph.types[value], mesh), cause=cause))
    in_place = {o for o, i in state_pairs if donated[i]}
    for position, (value, spec) in enumerate(zip(graph.outputs, layout.outputs, strict=True)):
        if position not in in_place:
            name = graph.output_names[position] if graph.output_names else f"output {position}"
            held.append(Holder(name=name, nbytes=spec.local_nbytes(graph.types[value], mesh), cause="outputs"))
    peak = _Region(graph, grouping, mesh, layout, schedule).peak()
    gaps = Holder(name="gaps between buffers", nbytes=gaps_nbytes(peak.spans), cause="transients")
    everything = (*held, *peak.holders, *((gaps,) if gaps.nbytes else ()))
    resident = sum(holder.nbytes for holder in (*held, gaps))
    nbytes = {cause: sum(h.nbytes for h in everything if h.cause == cause) for cause in CAUSES}
    return Memory(
        nbytes=MappingProxyType(nbytes),
        where=peak.where,
        holders=tuple(sorted(everything, key=lambda holder: -holder.nbytes)[:HOLDERS]),
        over_time=tuple(resident + live for live in peak.over_time),
    )


def gradient_nbytes(graph: Graph, mesh: Mesh, layout: Layout) -> int:
    """Bytes of all gradients on one device, as the apply phase reads them; they are not all there at the peak."""
    found = 0
    for index, node in enumerate(graph.nodes):
        if _phase(node) != "apply":
            continue
        for value, spec in zip(node.inputs, layout.placements[index].operands, strict=True):
            made = graph.producers.get(value)
            first = next(r for r in graph.consumers[value] if _phase(graph.nodes[r]) == "apply")
            if made is not None and _phase(graph.nodes[made]) == "backward" and first == index:
                found += spec.local_nbytes(graph.types[value], mesh)
    return found


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
        self.phases: list[Phase] = [_phase(node) for node in graph.nodes]

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


def _phase(node: Node) -> Phase:
    """The phase of a node; that of a loop over microbatches is `backward`, where its gradients are made."""
    found = phase(node)
    if found != "apply" or not node.subgraphs:
        return found
    inside = {_phase(inner) for body in node.subgraphs for inner in body.nodes}
    if "backward" in inside:
        return "backward"
    return "forward" if "forward" in inside else "apply"


def _read_forward(graph: Graph, grouping: Grouping) -> set[int]:
    """The values that the forward pass reads, that inside loops and branches included."""
    return set(_forward_reads(graph, grouping))


def _forward_reads(graph: Graph, grouping: Grouping) -> Iterator[int]:
    for index, node in enumerate(graph.nodes):
        if phase(node) == "forward":
            yield from node.inputs
        elif index in grouping.controls:
            control, slots = grouping.controls[index], set[int]()
            for body, inner in zip(control.bodies, grouping.bodies[index], strict=True):
                read = _read_forward(body.graph, inner)
                slots.update(s for v, s in zip(body.graph.inputs, body.inputs, strict=True) if v in read)
            yield from (v for v, wire in zip(node.inputs, control.operands, strict=True) if wire.slot in slots)


def _maker(graph: Graph, value: int) -> str:
    """The primitive and the source line that made a value."""
    if value not in graph.producers:
        return "constant"
    node = graph.nodes[graph.producers[value]]
    return f"{node.primitive} at {node.source}" if node.source else node.primitive
