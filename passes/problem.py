"""From a graph on a mesh to the sharding problem that is solved, and back from its answer to placements.

Bundles, the loose inputs and the slots of loops and branches are the problem's nodes; every value that one of them
makes and another reads is an edge. A body is a region of the same problem, its seconds counted once an iteration, so
what a loop carries and what is brought in before it are decided together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from passes.bundles import Grouping
from passes.control import Body, Control, Slot, Wire
from passes.ir import Graph, TensorType
from passes.mesh import Mesh
from passes.moves import Layout, Placement
from passes.phases import Phase
from passes.resharding import Resharder
from passes.rules import Assignment
from passes.sharding import ShardingSpec, replicated
from passes.sharding_problem import Edge, Floats, Indices, ShardingProblem
from passes.strategies import Table, Tabulator, outline

Specs = tuple[ShardingSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """Where a value is made: the node of the problem, and the value's placement under each of its strategies."""

    node: int
    specs: Specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value at the border of a node, `weight` times: its placement under each strategy, and which way it goes."""

    type: TensorType
    specs: Specs
    incoming: bool
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A loop or branch in the problem: a node for every slot, a region for every body."""

    control: Control
    slots: tuple[Border, ...]
    bodies: tuple[Region, ...]

    def wired(self, wire: Wire, choice: Sequence[int]) -> ShardingSpec:
        """The placement of an operand or result that hangs on a slot."""
        border = self.slots[wire.slot]
        return _stacked(border.specs[choice[border.node]], wire)


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """A graph in the problem: its bundles are nodes `first` and on, and `borders[v]` says where value v lives.

    `tables[b]` holds the strategies of bundle b, whose seconds count `weight` times; `joints` are its loops and
    branches, by node.
    """

    number: int
    graph: Graph
    grouping: Grouping
    first: int
    weight: float
    tables: tuple[Table, ...]
    borders: Mapping[int, Border]
    joints: Mapping[int, Joint]

    def all(self) -> Iterator[Region]:
        """This region and those inside it."""
        yield self
        for joint in self.joints.values():
            for body in joint.bodies:
                yield from body.all()

    def compute_seconds(self, choice: Sequence[int]) -> dict[Phase, float]:
        """Seconds of all bundles by phase, reshardings apart; what microbatches add up is part of their backward."""
        totals: dict[Phase, float] = {}
        for region in self.all():
            chosen = choice[region.first : region.first + len(region.tables)]
            for bundle, table, c in zip(region.grouping.bundles, region.tables, chosen, strict=True):
                spent = region.weight * table.strategies[c].compute_seconds
                when: Phase = "backward" if bundle.phase == "apply" and region.number else bundle.phase
                totals[when] = totals.get(when, 0.0) + spent
        return totals

    def assignments(self, choice: Sequence[int]) -> dict[int, Assignment]:
        """The assignment of every graph node that belongs to a bundle."""
        found: dict[int, Assignment] = {}
        for index, (bundle, table) in enumerate(zip(self.grouping.bundles, self.tables, strict=True)):
            strategy = table.strategies[choice[self.first + index]]
            found |= zip(sorted(bundle.members), strategy.assignments, strict=True)
        return found

    def placed(self, choice: Sequence[int]) -> tuple[dict[int, ShardingSpec], tuple[Placement, ...]]:
        """(home of every value, one placement per graph node) of an answer."""
        graph = self.graph
        assignments = self.assignments(choice)
        home = {value: border.specs[choice[border.node]] for value, border in self.borders.items()}
        home |= {value: replicated(graph.types[value].rank) for value in (*graph.constants, *graph.literals)}
        placements: list[Placement] = []
        for index, node in enumerate(graph.nodes):
            rule = self.grouping.rules[index]
            bodies: tuple[Layout, ...] = ()
            if index in assignments:
                operands = tuple(rule.operand_spec(o, assignments[index]) for o in range(len(node.inputs)))
                results = tuple(rule.result_spec(r, assignments[index]) for r in range(len(node.outputs)))
            elif index in self.joints:
                joint = self.joints[index]
                operands, results = (
                    tuple(joint.wired(wire, choice) for wire in wires)
                    for wires in (joint.control.operands, joint.control.results)
                )
                bodies = tuple(
                    region.inside(joint, body, choice)
                    for region, body in zip(joint.bodies, joint.control.bodies, strict=True)
                )
            elif rule.alias:
                operands = results = tuple(home[value] for value in node.inputs)
            else:
                operands = tuple(replicated(graph.types[v].rank) for v in node.inputs)
                results = tuple(replicated(graph.types[v].rank) for v in node.outputs)
            home.update(zip(node.outputs, results, strict=True))
            placements.append(Placement(operands=operands, results=results, bodies=bodies))
        return home, tuple(placements)

    def inside(self, joint: Joint, body: Body, choice: Sequence[int]) -> Layout:
        """The layout of a body, which takes its inputs from the slots and brings its outputs back to them."""
        _, placements = self.placed(choice)
        inputs, outputs = (
            tuple(joint.slots[s].specs[choice[joint.slots[s].node]] for s in slots)
            for slots in (body.inputs, body.outputs)
        )
        return Layout(inputs=inputs, placements=placements, outputs=outputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Assembly:
    """A sharding problem and what its nodes stand for; `crossings[n]` are the values on the edges of node n."""

    mesh: Mesh
    root: Region
    crossings: tuple[tuple[Crossing, ...], ...]
    problem: ShardingProblem
    tied: tuple[tuple[int, int], ...]

    def layout(self, choice: Sequence[int]) -> Layout:
        """Where everything is under an answer."""
        graph = self.root.graph
        home, placements = self.root.placed(choice)
        inputs = tuple(home[value] for value in graph.inputs)
        back = dict(self.tied)
        outputs = tuple(
            inputs[back[o]] if o in back else full_target(graph.types[v], home[v], Resharder(self.mesh))
            for o, v in enumerate(graph.outputs)
        )
        return Layout(inputs=inputs, placements=placements, outputs=outputs)


def _stacked(spec: ShardingSpec, wire: Wire) -> ShardingSpec:
    """A slice's placement as that of the stack, whose first dimension is never cut."""
    return replace(spec, dims=((), *spec.dims)) if wire.stacked else spec


def full_target(type: TensorType, spec: ShardingSpec, resharder: Resharder) -> ShardingSpec:
    """The placement without partial axes that is cheapest to reach."""
    if not spec.partial:
        return spec
    return min(full_placements(type, resharder), key=lambda target: resharder.cost(type, spec, target))


def full_placements(type: TensorType, resharder: Resharder) -> list[ShardingSpec]:
    """Every placement without partial axes whose axes divide, replicated first. Typed keys stay whole."""
    seconds = resharder.seconds(type)[0]
    every = resharder.placements(type.rank)
    if type.dtype.startswith("key<"):
        return [every[0]]
    return [spec for spec, reach in zip(every, seconds, strict=True) if not spec.partial and np.isfinite(reach)]


def slot_placements(slot: Slot, resharder: Resharder) -> list[ShardingSpec]:
    """Every placement of a slot; a carry that can be summed may stay partial, and is reduced once after the loop."""
    full = full_placements(slot.type, resharder)
    if slot.whole:
        return full[:1]
    if not slot.carry or not slot.type.dtype.startswith(("float", "bfloat")):
        return full
    seconds = resharder.seconds(slot.type)
    every = resharder.placements(slot.type.rank)
    return full + [s for s, reach in zip(every, seconds.T, strict=True) if s.partial and np.isfinite(reach[0])]


@dataclass(slots=True, kw_only=True)
class _Builder:
    """The nodes and edges of one problem, as regions are laid out and then connected."""

    mesh: Mesh
    resharder: Resharder
    refetch: bool
    regions: int = 0
    seconds: list[Floats] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    groups: dict[tuple[object, ...], int] = field(default_factory=dict)
    known: dict[tuple[TensorType, Specs, Specs], tuple[Floats, Indices, Indices, Specs, Specs]] = field(
        default_factory=dict
    )
    crossings: dict[int, dict[Crossing, None]] = field(default_factory=dict)
    reads: dict[int, list[int]] = field(default_factory=dict)

    def _node(self, seconds: Floats, kind: str) -> int:
        self.seconds.append(seconds)
        self.kinds.append(kind)
        return len(self.seconds) - 1

    def lay_out(self, graph: Graph, grouping: Grouping, inputs: Mapping[int, Border], weight: float) -> Region:
        """The nodes of a region, its inputs made elsewhere where `inputs` says so."""
        visible = _visible(graph, grouping)
        tabulator = Tabulator(graph, grouping, self.mesh, self.resharder)
        number, self.regions = self.regions, self.regions + 1
        first, tables, borders = len(self.seconds), list[Table](), dict(inputs)
        for bundle in grouping.bundles:
            shape, held, read = outline(bundle, graph, grouping, visible)
            table = tabulator.table(bundle, shape, held, read)
            node = self._node(weight * table.seconds, _kind(graph, sorted(bundle.members)))
            tables.append(table)
            self.reads[node] = read
            for position, specs in table.makes.items():
                borders[held[position]] = Border(node=node, specs=specs)
        for value in grouping.loose:
            if value not in borders:
                borders[value] = self._chosen(graph.types[value], full_placements(graph.types[value], self.resharder))
        joints: dict[int, Joint] = {}
        for index, control in grouping.controls.items():
            slots = tuple(self._chosen(slot.type, slot_placements(slot, self.resharder)) for slot in control.slots)
            bodies: list[Region] = []
            for body, inner in zip(control.bodies, grouping.bodies[index], strict=True):
                entering = dict(zip(body.graph.inputs, (slots[s] for s in body.inputs), strict=True))
                bodies.append(self.lay_out(body.graph, inner, entering, weight * max(body.trips, 1) * body.share))
            joints[index] = Joint(control=control, slots=slots, bodies=tuple(bodies))
            for value, wire in zip(graph.nodes[index].outputs, control.results, strict=True):
                slot = slots[wire.slot]
                borders[value] = Border(node=slot.node, specs=tuple(_stacked(spec, wire) for spec in slot.specs))
        return Region(
            number=number,
            graph=graph,
            grouping=grouping,
            first=first,
            weight=weight,
            tables=tuple(tables),
            borders=borders,
            joints=joints,
        )

    def _chosen(self, type: TensorType, specs: Sequence[ShardingSpec]) -> Border:
        """A node that stands for the placement of one value."""
        return Border(node=self._node(np.zeros(len(specs)), str(type)), specs=tuple(specs))

    def connect(self, region: Region) -> None:
        """The edges of a region and of those inside it."""
        for index, table in enumerate(region.tables):
            bundle = region.first + index
            late = region.grouping.bundles[index].phase == "backward"
            for position, specs in table.ports:
                self._connect(region, self.reads[bundle][position], bundle, specs, late)
        for index, joint in region.joints.items():
            operands = zip(region.graph.nodes[index].inputs, joint.control.operands, strict=True)
            for value, wire in operands:
                slot = joint.slots[wire.slot]
                specs = tuple(_stacked(spec, wire) for spec in slot.specs)
                self._connect(region, value, slot.node, specs)
            for body, inner in zip(joint.control.bodies, joint.bodies, strict=True):
                self.connect(inner)
                for value, slot in zip(body.graph.outputs, body.outputs, strict=True):
                    self._connect(inner, value, joint.slots[slot].node, joint.slots[slot].specs)

    def _connect(self, region: Region, value: int, target: int, after: Specs, late: bool = False) -> None:
        """The cost of bringing `value` to where `target` reads it: an edge, or a cost of the target alone."""
        graph, grouping = region.graph, region.grouping
        root = grouping.roots.get(value, value)
        type = graph.types[value]
        if root in grouping.free or root in graph.literals:
            return
        if root in graph.constants:
            whole = replicated(type.rank)
            self.seconds[target] += region.weight * np.array([self.resharder.cost(type, whole, s) for s in after])
            return
        border = region.borders[root]
        seconds, rows, columns, origins, labels = self._matrix(type, border.specs, after)
        if border.node == target:
            self.seconds[target] += region.weight * seconds[rows, columns]
        elif np.any(seconds > 0):
            for node, specs, incoming in ((border.node, border.specs, False), (target, after, True)):
                crossing = Crossing(type=type, specs=specs, incoming=incoming, weight=region.weight)
                self.crossings.setdefault(node, {})[crossing] = None
            # With `refetch`, weights are fetched again for the backward pass; otherwise readers share what was brought.
            share = (region.number, value, self.refetch and late and value in graph.inputs)
            self.edges.append(
                Edge(
                    source=border.node,
                    target=target,
                    before=rows,
                    after=columns,
                    seconds=seconds,
                    labels=labels,
                    origins=origins,
                    group=self.groups.setdefault(share, len(self.groups)),
                    weight=region.weight,
                )
            )

    def finish(self, root: Region, tied: tuple[tuple[int, int], ...]) -> Assembly:
        """The problem, its outputs back where they are state or at least whole."""
        graph, back = root.graph, dict(tied)
        for position, value in enumerate(graph.outputs):
            root_value = root.grouping.roots.get(value, value)
            if root_value not in root.borders:
                continue
            border = root.borders[root_value]
            if position in back:
                state = root.borders[graph.inputs[back[position]]]
                self._connect(root, value, state.node, state.specs)
                continue
            type = graph.types[value]
            reach = [0.0 if not s.partial else self._finish_seconds(type, s) for s in border.specs]
            self.seconds[border.node] += np.array(reach)
        return Assembly(
            mesh=self.mesh,
            root=root,
            crossings=tuple(tuple(self.crossings.get(node, ())) for node in range(len(self.seconds))),
            problem=ShardingProblem(seconds=tuple(self.seconds), edges=tuple(self.edges), kinds=tuple(self.kinds)),
            tied=tied,
        )

    def _finish_seconds(self, type: TensorType, spec: ShardingSpec) -> float:
        return min(self.resharder.cost(type, spec, target) for target in full_placements(type, self.resharder))

    def _matrix(self, type: TensorType, before: Specs, after: Specs) -> tuple[Floats, Indices, Indices, Specs, Specs]:
        key = (type, before, after)
        if key not in self.known:
            sources, targets = dict.fromkeys(before), dict.fromkeys(after)
            row, column = ({spec: i for i, spec in enumerate(specs)} for specs in (sources, targets))
            costs = self.resharder.matrix(type, tuple(sources), tuple(targets))
            rows, columns = np.array([row[s] for s in before]), np.array([column[s] for s in after])
            self.known[key] = (costs, rows, columns, tuple(sources), tuple(targets))
        return self.known[key]


def _kind(graph: Graph, members: Sequence[int]) -> str:
    """The operators of a bundle and their types."""
    nodes = (graph.nodes[m] for m in members)
    return "; ".join(" ".join((n.primitive, *(str(graph.types[v]) for v in (*n.inputs, *n.outputs)))) for n in nodes)


def _visible(graph: Graph, grouping: Grouping) -> frozenset[int]:
    """Values that leave their bundle: outputs, and what another bundle or an alias reads."""
    seen = set(graph.outputs)
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            outside = grouping.rules[index].alias or grouping.home.get(value) != grouping.bundle_of(node)
            if value in grouping.home and outside:
                seen.add(value)
    return frozenset(seen)


def assemble(
    graph: Graph,
    mesh: Mesh,
    grouping: Grouping,
    resharder: Resharder,
    tied: tuple[tuple[int, int], ...],
    *,
    refetch: bool = True,
) -> Assembly:
    """The sharding problem of a graph on one mesh; `tied` pairs (output, input) positions that are one state.

    With `refetch`, a weight is brought to where the backward pass wants it anew, and paid for again.
    """
    builder = _Builder(mesh=mesh, resharder=resharder, refetch=refetch)
    root = builder.lay_out(graph, grouping, {}, 1.0)
    builder.connect(root)
    return builder.finish(root, tied)


def without_dominated(assembly: Assembly, resharder: Resharder) -> ShardingProblem:
    """The problem without strategies that another one replaces at no extra cost, whatever the neighbours choose.

    Strategy s is dominated by t if t, plus taking every value that s reads from where s wants it to where t does, and
    every value that t makes to where s makes it, costs no more than s. Chains of reshardings are shortest paths, so the
    optimum does not change.
    """
    known: dict[tuple[object, ...], NDArray[np.bool_]] = {}
    masked: list[Floats] = []
    for seconds, crossings in zip(assembly.problem.seconds, assembly.crossings, strict=True):
        key = (seconds.tobytes(), crossings)
        if key not in known:
            known[key] = _undominated(seconds, crossings, resharder)
        masked.append(np.where(known[key], seconds, np.inf))
    return replace(assembly.problem, seconds=tuple(masked))


def _undominated(seconds: Floats, crossings: tuple[Crossing, ...], resharder: Resharder) -> NDArray[np.bool_]:
    """Which strategies stay; `replacing[s, t]` is what t costs in the place of s."""
    replacing = np.broadcast_to(seconds, (seconds.size, seconds.size)).copy()
    for crossing in crossings:
        specs = list(dict.fromkeys(crossing.specs))
        between = resharder.matrix(crossing.type, specs, specs)
        at = np.array([specs.index(spec) for spec in crossing.specs])
        detour = crossing.weight * between[np.ix_(at, at)]
        replacing += detour if crossing.incoming else detour.T
    kept = np.zeros(seconds.size, dtype=bool)
    for s in np.argsort(seconds, kind="stable"):
        # Equal up to rounding counts as dominated: the relation is transitive, so one of a tie always stays.
        kept[s] = np.isfinite(seconds[s]) and not np.any(replacing[s, kept] <= seconds[s] * (1 + 1e-12))
    return kept
