"""The memory that one of XLA's compilers needs for a planned program.

The plan is followed to what the compiler makes of it, and that is where the accuracy comes from:

    lower      the graph on local shapes, moves included, in XLA's own operations      passes/memory/device_program.py
    rewrite    layouts, products in parts, collectives that are sent as one            `Compiler.rewrite`
    fuse       which results are ever written to memory                                `Compiler.fuse`
    finish     what is changed once kernels are known                                  `Compiler.finish`
    order      the order in which kernels run                                          `Compiler.schedule`
    run        each result lives until its last reader                                 passes/memory/liveness.py
    count      the busiest moment, the bodies of loops at theirs                       here
    reuse      what lies where an argument was, or an output will be                   passes/memory/reuse.py
    pack       the gaps that are left where buffers come and go                        passes/memory/packing.py
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from passes.cluster import Mesh
from passes.ir import Graph
from passes.memory.buffer_origins import Made, Origins, holder_of
from passes.memory.device_lowering import Bodies, Context, Rewrite, Summed, lower, never_summed
from passes.memory.device_program import WHOLE, DeviceProgram, Interface, interface_of
from passes.memory.fusion import Kernel
from passes.memory.gpu_orders import TURNED
from passes.memory.gpu_peeling import FirstIteration
from passes.memory.holders import Temporaries
from passes.memory.kernel_graph import post_order
from passes.memory.liveness import Buffer, Lifetimes, lifetimes
from passes.memory.moments import Moments, moments, nothing, read_at
from passes.memory.on_chip import Chip, off_chip
from passes.memory.operations import Operation, elements_nbytes
from passes.memory.packing import ALIGNMENT, Span, gaps_nbytes
from passes.memory.reuse import Place, connected, unplaced
from passes.placement import Grouping, Layout, Placement, ReshardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """The parts in which XLA's compilers differ: what they rewrite, what they fuse, in which order kernels run, the
    bytes of an array as it is `stored`, those that fit on the chip itself, the `gaps` between those beside it and the
    `alignment` of each. Where arrays have to lie `beside` the chip up to some moment, what is on the chip is chosen
    before places are. The `tables` of a program take `table_nbytes` each where anything lies beside the chip. A
    reduce-scatter that is `summed` is an all-reduce of which a part is cut out. Copies may be added, and collectives
    combined, when the kernels are known, to `finish` them. One that `copies_late` knows their order when it copies what
    is read after it was to be written over. One that writes `over_views` takes places of other shapes, too; where a
    collective `ends_late`, what it sends is there until what it makes is read. One that `pipelines` sends what
    a loop stacks in the next iteration.
    """

    rewrite: Rewrite
    fuse: Callable[[Sequence[Operation], Iterable[int]], tuple[Kernel, ...]]
    schedule: Callable[[DeviceProgram, Sequence[Kernel]], list[int]]
    stored: Callable[[Operation], int] = elements_nbytes
    chip: Chip | None = None
    gaps: Callable[[Sequence[Span]], int] = gaps_nbytes
    alignment: int = ALIGNMENT
    beside: Callable[[DeviceProgram, Sequence[Kernel], Lifetimes, Sequence[int]], Callable[[Buffer], int]] | None = None
    tables: Callable[[DeviceProgram, Sequence[Kernel], Lifetimes], int] | None = None
    table_nbytes: int = 0
    summed: Summed = never_summed
    copies_late: bool = False
    over_views: bool = False
    ends_late: bool = False
    pipelines: bool = False
    finish: Callable[[DeviceProgram, Sequence[Kernel]], tuple[DeviceProgram, Sequence[Kernel]]] | None = None
    joined: Callable[[DeviceProgram, Sequence[Kernel], Sequence[int]], dict[int, int]] | None = None


def temporaries(
    compiler: Compiler,
    graph: Graph,
    grouping: Grouping,
    mesh: Mesh,
    layout: Layout,
    reshardings: ReshardingPlan,
    in_place: Mapping[int, int],
) -> Temporaries:
    """The bytes that the compiled step needs beside arguments and outputs."""
    region = _Region(compiler, graph, grouping, mesh, layout, reshardings)
    run = region.run(replace(WHOLE, carried=in_place))
    places, chip = region.places(run, in_place), compiler.chip
    spans: Sequence[Span] = run.spans
    fetched = 0
    if chip and compiler.beside:
        replaced = region.arguments(run, in_place)
        spans, fetched = off_chip([*spans, *replaced.values()], chip, run.moments, run.arguments)
        spans, copied = spans[: len(spans) - len(replaced)], spans[len(spans) - len(replaced) :]
        for output, span in zip(replaced, copied, strict=True):
            if output in places:
                places[output] = places[output]._replace(after=min(places[output].after, span.last))
    spans = [_aligned(span, compiler.alignment) for span in unplaced(spans, list(places.values()))]
    if chip and not compiler.beside:
        spans, fetched = off_chip(spans, chip, run.moments, run.arguments)
    spans = connected(spans)
    tables_nbytes = compiler.table_nbytes * (run.tables + fetched)
    if not spans:
        return Temporaries(where="", holders=(), gaps_nbytes=0, over_time=(0,) * len(run.moments.begins[:-1]))
    live = _live(spans, len(run.moments.sources))
    busiest = int(live.argmax())
    return Temporaries(
        where=run.moments.sources[busiest],
        holders=tuple(holder_of(span) for span in spans if span.first <= busiest <= span.last),
        gaps_nbytes=compiler.gaps(spans) + tables_nbytes,
        over_time=tuple(np.maximum.reduceat(live, run.moments.begins[:-1]).tolist()),
    )


def _live(spans: Sequence[Span], moments: int) -> NDArray[np.int64]:
    """Live bytes, [moments]."""
    change = np.zeros(moments + 1, dtype=np.int64)
    for span in spans:
        change[span.first] += span.nbytes
        change[span.last + 1] -= span.nbytes
    return change.cumsum()[:-1]


def _nowhere(_: Buffer) -> int:
    """The last moment in which a buffer has to lie beside the chip where all may be on it."""
    return -1


def _none(_program: DeviceProgram, _kernels: Sequence[Kernel], _lifetimes: Lifetimes) -> int:
    """The number of tables where there are none."""
    return 0


def _aligned(span: Span, alignment: int) -> Span:
    return span._replace(nbytes=-(-span.nbytes // alignment) * alignment)


def _inside(span: Span, moment: int, operations: int) -> Span:
    """The span of a body of so many operations that begins at a moment; bodies rank before what is around them."""
    return Span(
        nbytes=span.nbytes,
        first=span.first + moment,
        last=span.last + moment,
        made_by=span.made_by,
        rank=span.rank - operations,
        beside=span.beside + moment if span.beside >= 0 else -1,
        events=tuple([event + moment for event in span.events]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The spans of a region, those of the busiest bodies of its loops included, and the `arguments` that are read.

    `tables` are those of copies and of kernels that write several arrays, in its loops' bodies too.
    """

    spans: tuple[Span, ...]
    arguments: tuple[Span, ...]
    moments: Moments
    lifetimes: Lifetimes
    program: DeviceProgram
    tables: int

    @property
    def sends(self) -> bool:
        """Whether there are collectives in the region, or in a loop of it."""
        program = self.program
        return bool(program.sending) or any(operation.kind == "collective" for operation in program.operations)

    @property
    def nbytes(self) -> int:
        return int(_live(connected(self.spans), len(self.moments.sources)).max(initial=0))


class _Region:
    """A graph, or a body of one of its loops and branches, with the regions inside it."""

    def __init__(
        self,
        compiler: Compiler,
        graph: Graph,
        grouping: Grouping,
        mesh: Mesh,
        layout: Layout,
        reshardings: ReshardingPlan,
    ) -> None:
        self.compiler = compiler
        self.graph, self.grouping, self.mesh = graph, grouping, mesh
        self.layout, self.reshardings = layout, reshardings
        self.origins = Origins(graph)
        self.inside: dict[int, _Run] = {}

    @property
    def context(self) -> Context:
        """The context in which the region is lowered."""
        return Context(
            rules=self.grouping.rules,
            controls=self.grouping.controls,
            mesh=self.mesh,
            inside=self._inside,
            rewrite=self.compiler.rewrite,
            summed=self.compiler.summed,
            pipelines=self.compiler.pipelines,
        )

    def run(self, interface: Interface = WHOLE) -> _Run:
        """The spans of the region, given how a body relates to the values around it."""
        program = lower(self.graph, self.context, self.layout, self.reshardings, interface)
        program = replace(program, sending=self._sending(program))
        kernels = self.compiler.fuse(program.operations, program.outputs)
        if finish := self.compiler.finish:
            program, kernels = finish(program, kernels)
        allocation = lifetimes(
            program,
            kernels,
            interface.carried,
            self.compiler.schedule(program, kernels),
            self.compiler.stored,
            copies_late=self.compiler.copies_late,
            over_views=self.compiler.over_views,
            ends_late=self.compiler.ends_late,
        )
        joined = self.compiler.joined(program, kernels, allocation.order) if self.compiler.joined else {}
        made = moments(
            program,
            kernels,
            allocation.order,
            self.graph.nodes,
            {node: inside.moments for node, inside in self.inside.items()},
            self.compiler.chip.cost_of if self.compiler.chip else nothing,
            joined,
        )
        reads = read_at(allocation, made, joined)
        find, count = self.compiler.beside, self.compiler.tables or _none
        beside = find(program, kernels, allocation, made.begins) if find else _nowhere
        return _Run(
            spans=(
                *self._spans(program, allocation, made, beside, reads),
                *self._once(program, len(made.sources)),
                *self._within(program, allocation, made),
            ),
            arguments=tuple(self._read(program, reads)),
            moments=made,
            lifetimes=allocation,
            program=program,
            tables=count(program, kernels, allocation) + sum(inner.tables for inner in self.inside.values()),
        )

    def _sending(self, program: DeviceProgram) -> frozenset[int]:
        """The loops of the program in whose bodies there are collectives."""
        loops = (o for o, operation in enumerate(program.operations) if operation.kind == "loop")
        return frozenset(o for o in loops if self.inside[program.operations[o].node].sends)

    def _spans(
        self,
        program: DeviceProgram,
        allocation: Lifetimes,
        made: Moments,
        beside: Callable[[Buffer], int],
        reads: Callable[[int], Iterable[int]],
    ) -> Iterator[Span]:
        """The spans of the results of kernels."""
        place = post_order(program.operations, program.outputs)
        for chain, b in enumerate(allocation.buffers):
            events = sorted({moment for o in b.operations for moment in reads(o)})
            for first, last in _members(program, allocation, made.begins, b):
                yield Span(
                    b.nbytes,
                    first,
                    last,
                    Made(self.origins, program.operations, b, allocation.readers),
                    chain,
                    place[b.operations[0]],
                    min(last, beside(b)),
                    tuple(events[bisect_left(events, first) : bisect_right(events, last)]),
                )

    def _read(self, program: DeviceProgram, reads: Callable[[int], Iterable[int]]) -> Iterator[Span]:
        """The spans of arguments, up to their last readers."""
        for o in program.inputs:
            if events := sorted({*reads(o)}):
                yield Span(self.compiler.stored(program.operations[o]), 0, events[-1], events=tuple(events))

    def _within(self, program: DeviceProgram, allocation: Lifetimes, made: Moments) -> Iterator[Span]:
        """The spans inside loops."""
        for position, o in enumerate(allocation.order):
            operation = program.operations[o]
            if operation.kind == "loop":
                within = self.inside[operation.node]
                for span in connected(within.spans):
                    yield _inside(span, made.begins[position], len(within.program.operations))

    def _once(self, program: DeviceProgram, moments: int) -> Iterator[Span]:
        """The spans of what a loop does not repeat, which live all the while."""
        for o in program.hoisted:
            buffer = Buffer(
                operations=(o,), nbytes=self.compiler.stored(program.operations[o]), first=0, last=moments - 1
            )
            yield Span(buffer.nbytes, 0, moments - 1, Made(self.origins, program.operations, buffer))

    def places(self, run: _Run, in_place: Mapping[int, int]) -> dict[int, Place]:
        """The places of the outputs, which are those of inputs or their own, by output."""
        allocation, begins = run.lifetimes, run.moments.begins
        turns = post_order(run.program.operations, run.program.outputs)
        places: dict[int, Place] = {}
        for output, written in enumerate(allocation.written):
            if written < 0:
                continue
            read = allocation.read[in_place[output]] if output in in_place else -1
            nbytes = self.compiler.stored(run.program.operations[run.program.outputs[output]])
            places[output] = Place(
                nbytes=nbytes,
                after=begins[read + 1] - 1 if read >= 0 else -1,
                before=_begin(run.program, allocation, begins, written),
                over=frozenset(allocation.over.get(output, ())),
                turn=turns[run.program.inputs[in_place[output]] if output in in_place else run.program.outputs[output]],
            )
        return places

    def arguments(self, run: _Run, in_place: Mapping[int, int]) -> dict[int, Span]:
        """The spans of arguments that outputs replace, by output: beside the chip until they are read first."""
        at = dict(zip(run.lifetimes.order, run.moments.begins, strict=False))
        spans: dict[int, Span] = {}
        for output, position in in_place.items():
            argument = run.program.inputs[position]
            if read := [at[reader] for reader in run.lifetimes.readers.get(argument, ())]:
                nbytes = self.compiler.stored(run.program.operations[argument])
                spans[output] = Span(nbytes, min(read), max(read), beside=min(read))
        return spans

    def _inside(self, index: int, placement: Placement, known: Mapping[int, object]) -> Bodies:
        """The rank of each port that the bodies of a control node read, in the order in which they do, and what they
        carry on; adds the spans of its busiest body.
        """
        control = self.grouping.controls[index]
        reshardings = self.reshardings.bodies[index]
        regions = [
            _Region(self.compiler, body.graph, within, self.mesh, placed, moves)
            for body, within, placed, moves in zip(
                control.bodies, self.grouping.bodies[index], placement.bodies, reshardings, strict=True
            )
        ]
        interfaces = [interface_of(body, control, known) for body in control.bodies]
        runs = [region.run(interface) for region, interface in zip(regions, interfaces, strict=True)]
        self.inside[index] = max(runs, key=lambda run: run.nbytes)
        ports = (
            body.inputs[p] for body, run in zip(control.bodies, runs, strict=True) for p in _read_first(run.program)
        )
        ranks = {port: rank for rank, port in enumerate(dict.fromkeys(ports))}
        (region, *others), (body, *_), program = regions, control.bodies, runs[0].program
        turned = frozenset(
            port for port, o in zip(body.outputs, program.outputs, strict=False) if _is_turned(program, o)
        )
        if others or not program.pending:
            return Bodies(ranks, turned=turned)
        pending = tuple(body.outputs[output] for output in program.pending)
        first = FirstIteration(body, region.context, region.layout, region.reshardings, interfaces[0], pending)
        return Bodies(ranks, first.around, turned)


def _is_turned(program: DeviceProgram, output: int) -> bool:
    """Whether a stack of an output lies in another order."""
    tag = program.operations[output].tag
    return isinstance(tag, tuple) and cast("tuple[object, ...]", tag)[-1:] == (TURNED,)


def _read_first(program: DeviceProgram) -> list[int]:
    """The positions of the inputs that a body reads, in the order in which its outputs come to them."""
    place = post_order(program.operations, program.outputs)
    inputs = program.inputs[: len(program.inputs) - len(program.pending)]
    read = [position for position, o in enumerate(inputs) if place[o] >= 0]
    return sorted(read, key=lambda position: place[program.inputs[position]])


def _members(
    program: DeviceProgram, allocation: Lifetimes, begins: Sequence[int], buffer: Buffer
) -> Iterator[tuple[int, int]]:
    """The moments from which, and to which, each result in a buffer lives."""
    starts = [_begin(program, allocation, begins, kernel) for kernel in buffer.starts or (buffer.first,)]
    yield from zip(starts, (*starts[1:], begins[buffer.last + 1] - 1), strict=True)


def _begin(program: DeviceProgram, allocation: Lifetimes, begins: Sequence[int], kernel: int) -> int:
    """The moment in which a kernel writes its result; a branch writes it last."""
    return begins[kernel + 1] - 1 if program.operations[allocation.order[kernel]].kind == "loop" else begins[kernel]
