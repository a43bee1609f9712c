"""From a graph on a mesh to the sharding problem that is solved, and back from its answer to placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from passes.bundles import Grouping
from passes.intra_op import Edge, Floats, Indices, ShardingProblem
from passes.ir import Graph, TensorType
from passes.mesh import Mesh
from passes.moves import Placement
from passes.resharding import Resharder
from passes.rules import Assignment
from passes.sharding import ShardingSpec, replicated
from passes.strategies import Table, Tabulator, outline

Specs = tuple[ShardingSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """Where a value is made: the node of the problem, and the value's placement under each of its strategies."""

    node: int
    specs: Specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value at the border of a node: its placement under each strategy, and whether it comes in or goes out."""

    type: TensorType
    specs: Specs
    incoming: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Assembly:
    """A sharding problem and what its nodes stand for: bundles first, then the graph's loose inputs.

    `borders[v]` says where value v lives; `tables[b]` holds the strategies of bundle b; `crossings[n]` are the values
    on the edges of node n.
    """

    graph: Graph
    mesh: Mesh
    grouping: Grouping
    tables: tuple[Table, ...]
    borders: dict[int, Border]
    crossings: tuple[tuple[Crossing, ...], ...]
    problem: ShardingProblem
    tied: tuple[tuple[int, int], ...]

    def assignments(self, choice: Sequence[int]) -> dict[int, Assignment]:
        """The assignment of every graph node that belongs to a bundle."""
        found: dict[int, Assignment] = {}
        for bundle, table, chosen in zip(self.grouping.bundles, self.tables, choice, strict=False):
            found |= zip(sorted(bundle.members), table.strategies[chosen].assignments, strict=True)
        return found

    def compute_seconds(self, choice: Sequence[int]) -> float:
        """Seconds of the bundles themselves, reshardings apart."""
        chosen = zip(self.tables, choice, strict=False)
        return sum(table.strategies[c].compute_seconds for table, c in chosen)

    def placements(self, choice: Sequence[int]) -> tuple[Specs, tuple[Placement, ...], Specs]:
        """(input specs, one placement per graph node, output specs) of an answer."""
        graph = self.graph
        assignments = self.assignments(choice)
        home = {value: border.specs[choice[border.node]] for value, border in self.borders.items()}
        home |= {value: replicated(graph.types[value].rank) for value in (*graph.constants, *graph.literals)}
        placements: list[Placement] = []
        for index, node in enumerate(graph.nodes):
            rule = self.grouping.rules[index]
            if index in assignments:
                operands = tuple(rule.operand_spec(o, assignments[index]) for o in range(len(node.inputs)))
                results = tuple(rule.result_spec(r, assignments[index]) for r in range(len(node.outputs)))
            elif rule.alias:
                operands = results = tuple(home[value] for value in node.inputs)
            else:
                operands = tuple(replicated(graph.types[v].rank) for v in node.inputs)
                results = tuple(replicated(graph.types[v].rank) for v in node.outputs)
            home.update(zip(node.outputs, results, strict=True))
            placements.append(Placement(operands=operands, results=results))
        inputs = tuple(home[value] for value in graph.inputs)
        back = dict(self.tied)
        outputs = tuple(
            inputs[back[o]] if o in back else full_target(graph.types[v], home[v], Resharder(self.mesh))
            for o, v in enumerate(graph.outputs)
        )
        return inputs, tuple(placements), outputs


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


@dataclass(slots=True, kw_only=True)
class _Builder:
    graph: Graph
    mesh: Mesh
    grouping: Grouping
    resharder: Resharder
    tied: tuple[tuple[int, int], ...]
    tables: list[Table] = field(default_factory=list)
    borders: dict[int, Border] = field(default_factory=dict)
    reads: list[list[int]] = field(default_factory=list)
    seconds: list[Floats] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    groups: dict[tuple[object, ...], int] = field(default_factory=dict)
    known: dict[tuple[TensorType, Specs, Specs], tuple[Floats, Indices, Indices, Specs, Specs]] = field(
        default_factory=dict
    )
    crossings: dict[int, dict[Crossing, None]] = field(default_factory=dict)

    def run(self) -> Assembly:
        self._tabulate()
        self._add_inputs()
        for bundle, table in enumerate(self.tables):
            for position, specs in table.ports:
                value = self.reads[bundle][position]
                self._connect(value, bundle, specs, self._share(value, bundle))
        self._add_outputs()
        problem = ShardingProblem(seconds=tuple(self.seconds), edges=tuple(self.edges), kinds=self._kinds())
        return Assembly(
            graph=self.graph,
            mesh=self.mesh,
            grouping=self.grouping,
            tables=tuple(self.tables),
            borders=self.borders,
            crossings=tuple(tuple(self.crossings.get(node, ())) for node in range(len(self.seconds))),
            problem=problem,
            tied=self.tied,
        )

    def _kinds(self) -> tuple[str, ...]:
        """What every node of the problem is: the operators of a bundle and their types, or the type of an input."""
        types, nodes = self.graph.types, self.graph.nodes
        named: dict[int, str] = {}
        for index, node in enumerate(nodes):
            values = " ".join(str(types[v]) for v in (*node.inputs, *node.outputs))
            named[index] = f"{node.primitive} {values}"
        bundles = ["; ".join(named[m] for m in sorted(bundle.members)) for bundle in self.grouping.bundles]
        return (*bundles, *(str(types[value]) for value in self.grouping.loose))

    def _tabulate(self) -> None:
        visible = _visible(self.graph, self.grouping)
        tabulator = Tabulator(self.graph, self.grouping, self.mesh, self.resharder)
        for index, bundle in enumerate(self.grouping.bundles):
            shape, held, read = outline(bundle, self.graph, self.grouping, visible)
            table = tabulator.table(bundle, shape, held, read)
            self.tables.append(table)
            self.reads.append(read)
            self.seconds.append(table.seconds.copy())
            for position, specs in table.makes.items():
                self.borders[held[position]] = Border(node=index, specs=specs)

    def _add_inputs(self) -> None:
        for value in self.grouping.loose:
            specs = tuple(full_placements(self.graph.types[value], self.resharder))
            self.borders[value] = Border(node=len(self.seconds), specs=specs)
            self.seconds.append(np.zeros(len(specs)))

    def _share(self, value: int, bundle: int) -> tuple[object, ...]:
        """What must agree for two readers to share one resharding; weights are fetched again for the backward pass."""
        if value not in self.graph.inputs:
            return (value,)
        late = self.grouping.bundles[bundle].phase == "backward"
        return (value, late)

    def _connect(self, value: int, target: int, after: Specs, share: tuple[object, ...]) -> None:
        """The cost of bringing `value` to where `target` reads it: an edge, or a cost of the target alone."""
        root = self.grouping.roots.get(value, value)
        type = self.graph.types[value]
        if root in self.grouping.free or root in self.graph.literals:
            return
        if root in self.graph.constants:
            whole = replicated(type.rank)
            self.seconds[target] += np.array([self.resharder.cost(type, whole, spec) for spec in after])
            return
        border = self.borders[root]
        seconds, rows, columns, origins, labels = self._matrix(type, border.specs, after)
        if border.node == target:
            self.seconds[target] += seconds[rows, columns]
        elif np.any(seconds > 0):
            for node, specs, incoming in ((border.node, border.specs, False), (target, after, True)):
                self.crossings.setdefault(node, {})[Crossing(type=type, specs=specs, incoming=incoming)] = None
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
                )
            )

    def _matrix(self, type: TensorType, before: Specs, after: Specs) -> tuple[Floats, Indices, Indices, Specs, Specs]:
        key = (type, before, after)
        if key not in self.known:
            sources, targets = dict.fromkeys(before), dict.fromkeys(after)
            row, column = ({spec: i for i, spec in enumerate(specs)} for specs in (sources, targets))
            costs = self.resharder.matrix(type, tuple(sources), tuple(targets))
            rows, columns = np.array([row[s] for s in before]), np.array([column[s] for s in after])
            self.known[key] = (costs, rows, columns, tuple(sources), tuple(targets))
        return self.known[key]

    def _add_outputs(self) -> None:
        back = dict(self.tied)
        for position, value in enumerate(self.graph.outputs):
            root = self.grouping.roots.get(value, value)
            if root not in self.borders:
                continue
            if position in back:
                state = self.borders[self.graph.inputs[back[position]]]
                self._connect(value, state.node, state.specs, (value,))
                continue
            type = self.graph.types[value]
            border = self.borders[root]
            reach = [0.0 if not s.partial else self._finish_seconds(type, s) for s in border.specs]
            self.seconds[border.node] += np.array(reach)

    def _finish_seconds(self, type: TensorType, spec: ShardingSpec) -> float:
        return min(self.resharder.cost(type, spec, target) for target in full_placements(type, self.resharder))


def _visible(graph: Graph, grouping: Grouping) -> frozenset[int]:
    """Values that leave their bundle: outputs, and what another bundle or an alias reads."""
    seen = set(graph.outputs)
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            outside = grouping.rules[index].alias or grouping.home.get(value) != grouping.home.get(node.outputs[0])
            if value in grouping.home and outside:
                seen.add(value)
    return frozenset(seen)


def assemble(
    graph: Graph, mesh: Mesh, grouping: Grouping, resharder: Resharder, tied: tuple[tuple[int, int], ...]
) -> Assembly:
    """The sharding problem of a graph on one mesh; `tied` pairs (output, input) positions that are one state."""
    return _Builder(graph=graph, mesh=mesh, grouping=grouping, resharder=resharder, tied=tied).run()


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
        detour = between[np.ix_(at, at)]
        replacing += detour if crossing.incoming else detour.T
    kept = np.zeros(seconds.size, dtype=bool)
    for s in np.argsort(seconds, kind="stable"):
        # Equal up to rounding counts as dominated: the relation is transitive, so one of a tie always stays.
        kept[s] = np.isfinite(seconds[s]) and not np.any(replacing[s, kept] <= seconds[s] * (1 + 1e-12))
    return kept
