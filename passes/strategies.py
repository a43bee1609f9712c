"""The legal ways to place one bundle on a mesh, each with its seconds and with the placements at its border.

A strategy fixes the assignment of every member. Reshardings inside the bundle (the mean of a cut dimension, say) are
part of its cost; reshardings between bundles belong to the edges of the integer program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.bundles import Bundle, Grouping
from passes.cost import Work, local_flops
from passes.errors import NoLegalPlanError, explain
from passes.ir import Graph
from passes.mesh import Mesh
from passes.resharding import Resharder
from passes.rules import Assignment, ShardingRule, canonical
from passes.sharding import ShardingSpec

PARTIAL = -2
"""The class of an axis over which a bundle of linear operators keeps its values partial."""

Picks = tuple[tuple[str, int], ...]
"""(mesh axis, class) pairs in the order in which axes of one class stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One choice: what each axis cuts, the members' assignments, and seconds by cause."""

    picks: Picks
    assignments: tuple[Assignment, ...]
    compute_seconds: float
    reshard_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All strategies of a bundle: `reads[port][s]` and `makes[value][s]` are the placements at the border.

    A port is (position of the value among the bundle's operands, occurrence); values are positions too, so that bundles
    of one shape share a table. `seconds` [strategies] counts each bundle once.
    """

    strategies: tuple[Strategy, ...]
    ports: tuple[tuple[int, tuple[ShardingSpec, ...]], ...]
    makes: dict[int, tuple[ShardingSpec, ...]]
    seconds: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The shape of a bundle without its value numbers: equal outlines have equal tables.

    `operands` holds, per member, positions of its operands: (`in`, k) for the k-th value that the bundle holds, (`out`,
    k) for the k-th value read from elsewhere, None for literals and free values.
    """

    rules: tuple[int, ...]
    operands: tuple[tuple[tuple[str, int] | None, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    visible: tuple[int, ...]
    absorbed: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]


def outline(
    bundle: Bundle, graph: Graph, grouping: Grouping, visible: frozenset[int]
) -> tuple[Outline, list[int], list[int]]:
    """The outline of a bundle with the values that its positions stand for: (outline, held values, read values)."""
    held: dict[int, int] = {}
    read: dict[int, int] = {}
    members = sorted(bundle.members)
    for value in bundle.inputs:
        held.setdefault(value, len(held))
    for member in members:
        for value in graph.nodes[member].outputs:
            held.setdefault(value, len(held))
    operands: list[tuple[tuple[str, int] | None, ...]] = []
    for member in members:
        row: list[tuple[str, int] | None] = []
        for value in graph.nodes[member].inputs:
            if value in graph.literals or value in grouping.free:
                row.append(None)
            elif value in held:
                row.append(("in", held[value]))
            else:
                row.append(("out", read.setdefault(value, len(read))))
        operands.append(tuple(row))
    made = Outline(
        rules=tuple(id(grouping.rules[member]) for member in members),
        operands=tuple(operands),
        makes=tuple(tuple(held[v] for v in graph.nodes[member].outputs) for member in members),
        visible=tuple(held[v] for v in held if v in visible),
        absorbed=tuple(held[v] for v in bundle.inputs),
        classes=tuple(tuple(bundle.find(cls) for cls in bundle.factor_classes[m]) for m in members),
    )
    return made, list(held), list(read)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A rule under one assignment: the placements of its operands and results, and a device's flops."""

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    flops: float


class Tabulator:
    """Tables of bundles on one mesh; equal outlines are tabulated once, equal rules cut once."""

    def __init__(self, graph: Graph, grouping: Grouping, mesh: Mesh, resharder: Resharder) -> None:
        self.graph = graph
        self.grouping = grouping
        self.mesh = mesh
        self.resharder = resharder
        self._known: dict[Outline, Table] = {}
        self._cuts: dict[tuple[int, Assignment], _Cut] = {}
        self._extended: dict[tuple[int, Assignment, str, int], Assignment | None] = {}

    def table(self, bundle: Bundle, shape: Outline, held: list[int], read: list[int]) -> Table:
        """The table of a bundle with this outline; positions refer to `held` and `read`."""
        if shape not in self._known:
            self._known[shape] = _Tabulation(self, bundle, shape, held, read).run()
        return self._known[shape]

    def cut(self, rule: ShardingRule, assignment: Assignment) -> _Cut:
        """What an assignment makes of a rule of the grouping."""
        key = (id(rule), assignment)
        if key not in self._cuts:
            self._cuts[key] = _Cut(
                operands=tuple(rule.operand_spec(o, assignment) for o in range(len(rule.operands))),
                results=tuple(rule.result_spec(r, assignment) for r in range(len(rule.results))),
                flops=local_flops(rule, assignment, self.mesh),
            )
        return self._cuts[key]

    def extended(self, rule: ShardingRule, assignment: Assignment, axis: str, factor: int) -> Assignment | None:
        """An assignment with one more axis, None where the rule does not allow it."""
        key = (id(rule), assignment, axis, factor)
        if key not in self._extended:
            candidate = canonical((*assignment, (axis, factor)), self.mesh)
            self._extended[key] = candidate if rule.allows(candidate, self.mesh) else None
        return self._extended[key]


def picks(classes: list[int], axes: tuple[str, ...], *, partial: bool) -> Iterator[Picks]:
    """Every way to give each axis a class, none or (if `partial`) PARTIAL, axes of one class in every order."""
    options = (None, *classes, *((PARTIAL,) if partial else ()))
    seen: set[Picks] = set()
    for order in itertools.permutations(axes):
        for chosen in itertools.product(options, repeat=len(axes)):
            pairs = tuple((axis, cls) for axis, cls in zip(order, chosen, strict=True) if cls is not None)
            one = tuple(sorted(pairs, key=lambda pair: (pair[1], 0 if pair[1] >= 0 else axes.index(pair[0]))))
            if one not in seen:
                seen.add(one)
                yield one


class _Tabulation:
    def __init__(self, tabulator: Tabulator, bundle: Bundle, shape: Outline, held: list[int], read: list[int]) -> None:
        graph = tabulator.graph
        self.tabulator = tabulator
        self.mesh, self.resharder, self.bundle, self.shape = tabulator.mesh, tabulator.resharder, bundle, shape
        self.sizes = dict(zip(self.mesh.axes, self.mesh.sizes, strict=True))
        self.members = tuple(sorted(bundle.members))
        self.rules = [tabulator.grouping.rules[m] for m in self.members]
        self.held_types = [graph.types[v] for v in held]
        self.read_types = [graph.types[v] for v in read]
        self.held_nbytes, self.read_nbytes = ([t.nbytes for t in types] for types in (self.held_types, self.read_types))
        self.result_types = [[graph.types[v] for v in graph.nodes[m].outputs] for m in self.members]
        self.dtype = _dominant_dtype(graph, self.members)
        self.source = graph.nodes[self.members[0]].source

    def run(self) -> Table:
        found: dict[tuple[object, ...], tuple[Strategy, list[tuple[int, ShardingSpec]], dict[int, ShardingSpec]]] = {}
        for choice in picks(self.bundle.classes, self.mesh.axes, partial=self.bundle.light):
            placed = self._place(choice)
            if placed is None:
                continue
            strategy, reads, home = placed
            kept = frozenset[str]().union(*(home[v].partial for v in self.shape.visible))
            if any(cls == PARTIAL and axis not in kept for axis, cls in choice):
                continue  # reduced inside: the strategy without this axis does the same
            border = (*(spec for _, spec in reads), *(home[v] for v in (*self.shape.visible, *self.shape.absorbed)))
            best = found.get(border)
            seconds = strategy.compute_seconds + strategy.reshard_seconds
            if best is None or seconds < best[0].compute_seconds + best[0].reshard_seconds:
                found[border] = placed
        if not found:
            raise NoLegalPlanError(self._unmet())
        chosen = list(found.values())
        strategies = tuple(strategy for strategy, _, _ in chosen)
        ports: dict[tuple[int, tuple[ShardingSpec, ...]], None] = {}
        for port in range(len(chosen[0][1])):
            ports[(chosen[0][1][port][0], tuple(reads[port][1] for _, reads, _ in chosen))] = None
        border_values = (*self.shape.visible, *self.shape.absorbed)
        return Table(
            strategies=strategies,
            ports=tuple(ports),
            makes={v: tuple(home[v] for _, _, home in chosen) for v in border_values},
            seconds=np.array([s.compute_seconds + s.reshard_seconds for s in strategies]),
        )

    def _place(self, choice: Picks) -> tuple[Strategy, list[tuple[int, ShardingSpec]], dict[int, ShardingSpec]] | None:
        """The bundle under one choice, or None where an axis does not divide or an input would be partial."""
        home: dict[int, ShardingSpec] = {}
        moved: set[tuple[int, ShardingSpec]] = set()
        reads: list[tuple[int, ShardingSpec]] = []
        assignments: list[Assignment] = []
        reshard = flops = nbytes = 0.0
        for position in range(len(self.members)):
            rule = self.rules[position]
            assignment = self._assign(position, choice, home)
            if assignment is None:
                return None
            assignments.append(assignment)
            cut = self.tabulator.cut(rule, assignment)
            flops += cut.flops
            for operand, where in enumerate(self.shape.operands[position]):
                if where is None:
                    continue
                spec = cut.operands[operand]
                kind, value = where
                if kind == "out":
                    reads.append((value, spec))
                    nbytes += self._read_nbytes(position, operand, self.read_nbytes[value], spec)
                elif value not in home:
                    if spec.partial:
                        return None
                    home[value] = spec
                    nbytes += self._read_nbytes(position, operand, self.held_nbytes[value], spec)
                elif home[value] != spec and (value, spec) not in moved:
                    moved.add((value, spec))
                    reshard += self.resharder.cost(self.held_types[value], home[value], spec)
            for result, value in enumerate(self.shape.makes[position]):
                home[value] = cut.results[result]
        if not np.isfinite(reshard):
            return None
        nbytes += sum(self._parts_nbytes(self.held_nbytes[v], home[v]) for v in self.shape.visible)
        work = Work(flops=flops, nbytes=nbytes, dtype=self.dtype)
        compute = work.seconds(self.mesh.cluster.group().device)
        strategy = Strategy(
            picks=choice, assignments=tuple(assignments), compute_seconds=compute, reshard_seconds=reshard
        )
        return strategy, reads, home

    def _unmet(self) -> str:
        """Why no strategy is left: the first constraint of the user's that this mesh cannot meet."""
        wanted = next((rule.pieces for rule in self.rules if rule.pieces), ())
        pieces = ", ".join("any" if count is None else f"{count}" for count in wanted)
        return explain(
            f"a sharding constraint to [{pieces}] pieces of {self.result_types[0][0]}",
            f"no axes of the mesh cut it so; the last one tried is {self.mesh}",
            f"at {self.source}",
            "ask for pieces that the mesh's axes make, drop the constraint, or plan with Auto(max_axes=3)",
        )

    def _assign(self, position: int, choice: Picks, home: dict[int, ShardingSpec]) -> Assignment | None:
        """The member's assignment under the bundle's choice; None where an axis does not divide.

        An axis cuts the member's factor of its class; failing that, a linear member passes on what is partial already.
        """
        rule = self.rules[position]
        classes = self.shape.classes[position]
        found: Assignment = ()
        for axis, cls in choice:
            factor = classes.index(cls) if cls >= 0 and cls in classes else self._linear(position, axis, cls, home)
            if factor is None:
                continue
            extended = self.tabulator.extended(rule, found, axis, factor)
            if extended is not None:
                found = extended
            elif rule.factors[factor].size:
                return None
        return found if not rule.pieces or rule.fulfils(found, self.mesh) else None

    def _linear(self, position: int, axis: str, cls: int, home: dict[int, ShardingSpec]) -> int | None:
        """The linear factor that carries `axis` through a member, if its operands are partial over it or may be."""
        rule = self.rules[position]
        operands = self.shape.operands[position]
        incoming = (
            {o for o, w in enumerate(operands) if w is not None and w[0] == "in" and axis in home[w[1]].partial}
            if all(w is None or w[0] == "out" or w[1] in home for w in operands)
            else set[int]()
        )
        for factor, properties in enumerate(rule.factors):
            if properties.size or not properties.partial:
                continue
            carried = set(properties.partial)
            sources = {where[0] for o in carried if (where := operands[o]) is not None}
            if incoming and incoming <= carried and not self._grows(position, incoming):
                return factor
            if cls == PARTIAL and not incoming and sources == {"out"}:
                return factor
        return None

    def _grows(self, position: int, incoming: set[int]) -> bool:
        """Whether the result is larger than what comes in partial: then reducing first is cheaper."""
        before = max(self._operand_size(position, operand) for operand in incoming)
        return self.result_types[position][0].size > before

    def _operand_size(self, position: int, operand: int) -> int:
        where = self.shape.operands[position][operand]
        if where is None:
            return 1
        return (self.held_types if where[0] == "in" else self.read_types)[where[1]].size

    def _read_nbytes(self, position: int, operand: int, nbytes: float, spec: ShardingSpec) -> float:
        if operand in self.rules[position].sparse:
            return min(nbytes, float(self.result_types[position][0].nbytes))
        return self._parts_nbytes(nbytes, spec)

    def _parts_nbytes(self, nbytes: float, spec: ShardingSpec) -> float:
        for axes in spec.dims:
            for axis in axes:
                nbytes /= self.sizes[axis]
        return nbytes


def _dominant_dtype(graph: Graph, members: tuple[int, ...]) -> str:
    """The dtype that the first member computes in: its first operand's, or its result's where it reads nothing."""
    node = graph.nodes[members[0]]
    value = (*node.inputs, *node.outputs)[0]
    return graph.types[value].dtype
