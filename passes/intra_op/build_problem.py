"""The sharding problem of a graph on a mesh: its nodes, their strategies' seconds, and the edges between them.

Operator groups, the loose inputs and the ports of loops and branches are the problem's nodes; every value that one of
them makes and another reads is an edge. A body is a subproblem of the same problem, its seconds counted once an
iteration, so what a loop carries and what is brought in before it are decided together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.cluster import Mesh
from passes.gc_pause import without_gc
from passes.intra_op.assembly import (
    Assembly,
    ControlJoin,
    Specs,
    Subproblem,
    ValueSite,
    finish_seconds,
    full_placements,
    stacked,
)
from passes.intra_op.group_signatures import signature_of
from passes.intra_op.matrices import Matrix, SharedTables
from passes.intra_op.reductions import Read, with_sums
from passes.intra_op.stacks import Copies, copies
from passes.intra_op.strategies import Table, Tabulator
from passes.ir import Control, Graph, Port, StatePairs, TensorType, phase
from passes.placement import Background, Grouping, weights
from passes.rules import made_anywhere
from passes.sharding import Resharder, ShardingSpec, replicated
from passes.solver import Edge, Floats, ShardingProblem


def port_placements(port: Port, resharder: Resharder) -> list[ShardingSpec]:
    """The placements that a port may have; a sum may stay partial there, to be reduced once after the loop or
    branch.
    """
    full = full_placements(port.type, resharder)
    if port.whole:
        return full[:1]
    if not (port.carry or port.stacked or port.branched) or not port.type.is_inexact:
        return full
    seconds = resharder.seconds(port.type)
    every = resharder.placements(port.type.rank)
    return full + [s for s, costs in zip(every, seconds.T, strict=True) if s.partial and np.isfinite(costs[0])]


@dataclass(slots=True, kw_only=True)
class _Builder:
    """The nodes and edges of one problem, as subproblems are laid out and then connected."""

    mesh: Mesh
    resharder: Resharder
    regather: bool
    subproblems: int = 0
    seconds: list[Floats] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    edge_reads: list[Read] = field(default_factory=list)
    groups: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    sums: dict[tuple[int, int], int] = field(default_factory=dict)
    passed: dict[int, frozenset[int]] = field(default_factory=dict)
    reads: dict[int, list[int]] = field(default_factory=dict)
    inputs: dict[int, tuple[tuple[int, Specs], ...]] = field(default_factory=dict)
    backgrounds: dict[int, Background] = field(default_factory=dict)

    @property
    def shared(self) -> SharedTables:
        """The tables of the mesh, which other problems on it have as well."""
        return self.resharder.kept(SharedTables)

    def _node(self, seconds: Floats, kind: str) -> int:
        self.seconds.append(seconds)
        self.kinds.append(kind)
        return len(self.seconds) - 1

    def lay_out(
        self, graph: Graph, grouping: Grouping, background: Background, inputs: Mapping[int, ValueSite], weight: float
    ) -> Subproblem:
        """The subproblem of a graph, whose nodes join the problem; the values in `inputs` are decided elsewhere."""
        leaving, anew = visible(graph, grouping), remade(graph, grouping)
        tabulator = self.resharder.kept(Tabulator)
        operators = tabulator.operators(graph, grouping)
        number, self.subproblems = self.subproblems, self.subproblems + 1
        self.backgrounds[number] = background
        first, tables, sites = len(self.seconds), list[Table](), dict(inputs)
        for operator_group in grouping.operator_groups:
            whole = (operator_group, graph, grouping, leaving, operators, anew, background)
            signature, written, read = signature_of(*whole)
            table = tabulator.table(signature, graph.nodes[min(operator_group.members)].source)
            interface = self.shared.interface(table, graph, operator_group)
            node = self._node(weight * table.seconds, interface.kind)
            tables.append(table)
            self.reads[node], self.inputs[node] = read, interface.inputs
            for position, specs in interface.makes:
                sites[written[position]] = ValueSite(node=node, specs=specs)
        for value in grouping.loose:
            if value not in sites:
                sites[value] = self._chosen(graph.types[value], self.shared.full(graph.types[value]), Copies(), weight)
        control_joins: dict[int, ControlJoin] = {}
        for index, control in grouping.controls.items():
            results = zip(graph.nodes[index].outputs, control.results, strict=True)
            handed_on = {port_use.port for value, port_use in results if value in graph.returned}
            within = zip(grouping.bodies[index], background.inside(index, control), strict=True)
            control_joins[index] = self._control_join(control, list(within), weight, handed_on)
            ports = control_joins[index].ports
            for value, port_use in zip(graph.nodes[index].outputs, control.results, strict=True):
                port = ports[port_use.port]
                specs = self.shared.interned(tuple(stacked(spec, port_use) for spec in port.specs))
                sites[value] = ValueSite(node=port.node, specs=specs)
        return Subproblem(
            number=number,
            graph=graph,
            grouping=grouping,
            first=first,
            weight=weight,
            tables=tuple(tables),
            sites=sites,
            control_joins=control_joins,
        )

    def _control_join(
        self, control: Control, within: Sequence[tuple[Grouping, Background]], weight: float, handed_on: Collection[int]
    ) -> ControlJoin:
        """The nodes of a loop's or branch's ports, and the subproblems of its bodies `within`.

        A sum stays partial in a port unless the program returns it: another stage may read it in each iteration.
        """
        ports = {s: port_placements(port, self.resharder) for s, port in enumerate(control.ports)}
        copied = copies(control, [grouping for grouping, _ in within])
        made = {s for s, port in enumerate(control.ports) if port.stacked or port.branched}
        types = [port.type for port in control.ports]
        alone = [s for s in ports if s not in made]
        sites = {s: self._chosen(types[s], ports[s], copied.get(s, Copies()), weight) for s in alone}
        bodies: list[Subproblem] = []
        for body, (grouping, background) in zip(control.bodies, within, strict=True):
            entering = dict(zip(body.graph.inputs, (sites[s] for s in body.inputs), strict=True))
            bodies.append(self.lay_out(body.graph, grouping, background, entering, weight * body.runs))
        for s in sorted(made):
            sums = s not in handed_on and _may_be_sum(control, bodies, s)
            specs = [spec for spec in ports[s] if sums or not spec.partial]
            sites[s] = self._chosen(types[s], specs, copied.get(s, Copies()), weight)
        copying = {s: self.seconds[sites[s].node].copy() for s in copied}
        at_ports = tuple(sites[s] for s in range(len(ports)))
        return ControlJoin(control=control, ports=at_ports, bodies=tuple(bodies), copying=copying)

    def _chosen(self, type: TensorType, specs: Sequence[ShardingSpec], copied: Copies, weight: float) -> ValueSite:
        """A new node that decides the placement of one value; the loop that copies slices runs `weight` times."""
        seconds = [weight * copied.seconds(spec.local_nbytes(type, self.mesh), self.mesh) for spec in specs]
        return ValueSite(node=self._node(np.array(seconds), str(type)), specs=self.shared.interned(tuple(specs)))

    def connect(self, subproblem: Subproblem) -> None:
        """Adds the edges of a subproblem and of all subproblems inside it."""
        for index, operator_group in enumerate(subproblem.grouping.operator_groups):
            node, late = subproblem.first + index, operator_group.phase == "backward"
            for position, specs in self.inputs[node]:
                self._connect(subproblem, self.reads[node][position], node, specs, None, late=late)
        for index, control_join in subproblem.control_joins.items():
            loop = subproblem.graph.nodes[index]
            for value, port_use in zip(loop.inputs, control_join.control.operands, strict=True):
                port = control_join.ports[port_use.port]
                specs = self.shared.interned(tuple(stacked(spec, port_use) for spec in port.specs))
                self._connect(subproblem, value, port.node, specs, index, late=phase(loop) == "backward")
            for body, inner in zip(control_join.control.bodies, control_join.bodies, strict=True):
                self.connect(inner)
                for value, port in zip(body.graph.outputs, body.outputs, strict=True):
                    site = control_join.ports[port]
                    self._connect(inner, value, site.node, site.specs, len(body.graph.nodes))

    def _connect(
        self, subproblem: Subproblem, value: int, target: int, after: Specs, at: int | None, *, late: bool = False
    ) -> None:
        """Adds the cost of bringing `value` to its reader `target`: an edge, or seconds of the target's own strategies.

        The target, of the backward pass if it is `late`, is an operator group, or reads the value at node `at`.
        """
        graph, grouping = subproblem.graph, subproblem.grouping
        root = grouping.roots.get(value, value)
        type = graph.types[value]
        if root in grouping.free or root in graph.literals:
            return
        if root in graph.constants:
            copies = replicated(type.rank)
            self.seconds[target] += subproblem.weight * np.array([self.resharder.cost(type, copies, s) for s in after])
            return
        site, behind = subproblem.sites[root], self.backgrounds[subproblem.number].behind(value)
        matrix = self.shared.matrix(type, site.specs, after, behind)
        if site.node == target:
            self.seconds[target] += subproblem.weight * matrix.seconds[matrix.before, matrix.after]
        elif not matrix.free:
            read = Read(subproblem, value, at, behind)
            if root in self._passed(subproblem) and any(spec.partial for spec in site.specs):
                # What is summed up before a barrier is let through as a sum; anything else is brought again behind it.
                sums, matrix = self.shared.halves(type, site.specs, after, behind)
                group = self.sums.setdefault((subproblem.number, root), len(self.groups) + len(self.sums))
                self._edge(site.node, target, sums, group, subproblem.weight, read)
            # With `regather`, weights are gathered again for the backward pass; otherwise readers share the first copy.
            readers = (subproblem.number, value, late and self.regather and value in weights(graph))
            group = self.groups.setdefault(readers, len(self.groups) + len(self.sums))
            self._edge(site.node, target, matrix, group, subproblem.weight, read)

    def _edge(self, source: int, target: int, matrix: Matrix, group: int, weight: float, read: Read) -> None:
        if not matrix.free:
            self.edge_reads.append(read)
            self.edges.append(matrix.edge(source, target, group, weight))

    def _passed(self, subproblem: Subproblem) -> frozenset[int]:
        """The values that are read both in front of a barrier and behind it."""
        if subproblem.number not in self.passed:
            graph, rules = subproblem.graph, subproblem.grouping.rules
            roots = set(subproblem.grouping.roots.values())
            self.passed[subproblem.number] = frozenset(
                v for v in roots if not all(rules[reader].alias for reader in graph.consumers.get(v, ()))
            )
        return self.passed[subproblem.number]

    def finish(self, root: Subproblem, state_pairs: StatePairs) -> Assembly:
        """The assembly, with the cost of returning state to where it came from and of reducing other outputs."""
        graph, back = root.graph, dict(state_pairs)
        for position, value in enumerate(graph.outputs):
            root_value = root.grouping.roots.get(value, value)
            if root_value not in root.sites:
                continue
            site = root.sites[root_value]
            if position in back:
                state = root.sites[graph.inputs[back[position]]]
                self._connect(root, value, state.node, state.specs, len(graph.nodes))
                continue
            type = graph.types[value]
            behind = self.backgrounds[root.number].behind(value)
            self.seconds[site.node] += np.array([finish_seconds(type, s, self.resharder, behind) for s in site.specs])
        return Assembly(
            mesh=self.mesh,
            root=root,
            problem=ShardingProblem(
                seconds=tuple(self.seconds),
                edges=with_sums(self.edges, self.edge_reads, self.resharder),
                kinds=tuple(self.kinds),
                cache=self.shared.cache,
            ),
            state_pairs=state_pairs,
            regather=self.regather,
            groups=self.groups,
        )


def _may_be_sum(control: Control, bodies: Sequence[Subproblem], port: int) -> bool:
    """Whether some body may bring a partial sum to a port."""
    for body, inner in zip(control.bodies, bodies, strict=True):
        for value in (v for v, s in zip(body.graph.outputs, body.outputs, strict=True) if s == port):
            site = inner.sites.get(inner.grouping.roots.get(value, value))
            if site is not None and any(spec.partial for spec in site.specs):
                return True
    return False


def visible(graph: Graph, grouping: Grouping) -> frozenset[int]:
    """The values that leave their operator group: outputs of the graph, and those that another operator group or an
    alias reads.
    """
    leaving = set(graph.outputs)
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            outside = grouping.rules[index].alias or grouping.home.get(value) != grouping.operator_group_of(node)
            if value in grouping.home and outside:
                leaving.add(value)
    return frozenset(leaving)


def remade(graph: Graph, grouping: Grouping) -> frozenset[int]:
    """The values that each of their readers computes anew from something smaller: broadcasts that operators fuse.

    Loops, matrix products, barriers and the program's outputs need the array in memory, so what they read is not among
    them.
    """
    anew = set[int]()
    for node, rule in zip(graph.nodes, grouping.rules, strict=True):
        if rule.light and made_anywhere(node) and node.inputs:
            (value,), largest = node.outputs, max(graph.types[v].nbytes for v in node.inputs)
            readers = graph.consumers.get(value, ())
            fused = all(grouping.rules[reader].light and not grouping.rules[reader].alias for reader in readers)
            if fused and value not in graph.returned and graph.types[value].nbytes > largest:
                anew.add(value)
    return frozenset(anew)


@without_gc()
def assemble(
    graph: Graph,
    mesh: Mesh,
    grouping: Grouping,
    resharder: Resharder,
    state_pairs: StatePairs,
    *,
    regather: bool = True,
) -> Assembly:
    """The sharding problem of a graph on one mesh; `state_pairs` are the (output, input) positions of its state.

    With `regather`, weights are gathered again for the backward pass, and that is paid for again.
    """
    builder = _Builder(mesh=mesh, resharder=resharder, regather=regather)
    root = builder.lay_out(graph, grouping, Background.of(graph), {}, 1.0)
    builder.connect(root)
    return builder.finish(root, state_pairs)
