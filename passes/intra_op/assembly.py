"""A sharding problem with the parts of the program that its nodes stand for, and the layout that an answer chooses.

Each graph is a subproblem: its operator groups are nodes of the problem, its values are decided at sites, and its loops
and branches contain further subproblems.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from passes.cluster import Mesh
from passes.intra_op.strategies import Table
from passes.ir import Body, Control, Graph, Phase, PortUse, StatePairs, TensorType, phase
from passes.placement import Grouping, Layout, Placement
from passes.sharding import Behind, Resharder, ShardingSpec, replicated
from passes.solver import Floats, ShardingProblem

Specs = tuple[ShardingSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSite:
    """The site of a value: the node of the problem that decides it, and its placement under each strategy of
    the node.
    """

    node: int
    specs: Specs


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlJoin:
    """A loop or branch in the problem: a node for every port, and a subproblem for every body.

    `copying` has the seconds, by placement, of the ports whose slices the loop copies.
    """

    control: Control
    ports: tuple[ValueSite, ...]
    bodies: tuple[Subproblem, ...]
    copying: Mapping[int, Floats]

    def copy_seconds(self, choice: Sequence[int]) -> float:
        """Seconds in which the loop copies slices out of stacked arrays and into them."""
        return sum(float(seconds[choice[self.ports[port].node]]) for port, seconds in self.copying.items())

    def spec_of_use(self, port_use: PortUse, choice: Sequence[int]) -> ShardingSpec:
        """The placement of an operand or result of a loop or branch, which is that of its port."""
        site = self.ports[port_use.port]
        return stacked(site.specs[choice[site.node]], port_use)


@dataclass(frozen=True, kw_only=True, eq=False)
class Subproblem:
    """A graph as part of the problem: its operator groups are the nodes from `first` on, and `sites[v]` decides value
    v.

    `tables[b]` holds the strategies of operator group b, whose seconds count `weight` times, once an iteration;
    `control_joins` are its loops and branches, by graph node.
    """

    number: int
    graph: Graph
    grouping: Grouping
    first: int
    weight: float
    tables: tuple[Table, ...]
    sites: Mapping[int, ValueSite]
    control_joins: Mapping[int, ControlJoin]

    def all(self) -> Iterator[Subproblem]:
        """This subproblem and all subproblems inside it."""
        yield self
        for control_join in self.control_joins.values():
            for body in control_join.bodies:
                yield from body.all()

    def compute_seconds(self, choice: Sequence[int]) -> dict[Phase, float]:
        """Seconds of all operator groups by phase, without reshardings; sums over microbatches are part of the backward
        pass.
        """
        totals: dict[Phase, float] = {}
        for subproblem in self.all():
            chosen = choice[subproblem.first : subproblem.first + len(subproblem.tables)]
            for operator_group, table, c in zip(
                subproblem.grouping.operator_groups, subproblem.tables, chosen, strict=True
            ):
                spent = subproblem.weight * table.strategies[c].compute_seconds
                when: Phase = (
                    "backward" if operator_group.phase == "apply" and subproblem.number else operator_group.phase
                )
                totals[when] = totals.get(when, 0.0) + spent
            for index, control_join in subproblem.control_joins.items():
                if spent := control_join.copy_seconds(choice):
                    when = phase(subproblem.graph.nodes[index])
                    totals[when] = totals.get(when, 0.0) + spent
        return totals

    def assigned(self, choice: Sequence[int]) -> dict[int, Placement]:
        """The placement of every graph node that belongs to an operator group; equal operator groups share
        one object.
        """
        placements: dict[int, Placement] = {}
        shared: dict[tuple[int, int], list[Placement]] = {}
        for index, (operator_group, table) in enumerate(zip(self.grouping.operator_groups, self.tables, strict=True)):
            members, chosen = sorted(operator_group.members), choice[self.first + index]
            key = (id(table), chosen)
            if key not in shared:
                rules = [self.grouping.rules[member] for member in members]
                shared[key] = list(map(Placement.of, rules, table.strategies[chosen].assignments))
            placements |= zip(members, shared[key], strict=True)
        return placements

    def placed(self, choice: Sequence[int]) -> tuple[dict[int, ShardingSpec], tuple[Placement, ...]]:
        """The placement of every value, and one of every graph node, under an answer."""
        graph = self.graph
        assigned = self.assigned(choice)
        specs = {value: site.specs[choice[site.node]] for value, site in self.sites.items()}
        specs |= {value: replicated(graph.types[value].rank) for value in (*graph.constants, *graph.literals)}
        placements: list[Placement] = []
        for index, node in enumerate(graph.nodes):
            if index in assigned:
                placements.append(assigned[index])
                specs.update(zip(node.outputs, assigned[index].results, strict=True))
                continue
            bodies: tuple[Layout, ...] = ()
            if index in self.control_joins:
                control_join = self.control_joins[index]
                operands, results = (
                    tuple(control_join.spec_of_use(port_use, choice) for port_use in port_uses)
                    for port_uses in (control_join.control.operands, control_join.control.results)
                )
                bodies = tuple(
                    subproblem.inside(control_join, body, choice)
                    for subproblem, body in zip(control_join.bodies, control_join.control.bodies, strict=True)
                )
            elif self.grouping.rules[index].alias:
                operands = results = self._passed(index, specs, choice, assigned)
            else:
                operands = tuple(replicated(graph.types[v].rank) for v in node.inputs)
                results = tuple(replicated(graph.types[v].rank) for v in node.outputs)
            specs.update(zip(node.outputs, results, strict=True))
            placements.append(Placement(operands=operands, results=results, bodies=bodies))
        return specs, tuple(placements)

    def settled(self, value: int, specs: Mapping[int, ShardingSpec], choice: Sequence[int]) -> ShardingSpec:
        """The placement in which other nodes find a value: that of its producer, or the one that it is reduced to."""
        site = self.sites.get(self.grouping.roots.get(value, value))
        return site.specs[choice[site.node]] if site else specs[value]

    def _passed(
        self, index: int, specs: Mapping[int, ShardingSpec], choice: Sequence[int], assigned: Mapping[int, Placement]
    ) -> tuple[ShardingSpec, ...]:
        """The placements of a barrier's operands: as they are, or reduced where a reader beside the barrier needs them
        so.

        Otherwise a reader behind the barrier, such as recomputation, would reduce them again. Where a reader there
        takes partial sums, they stay partial.
        """
        node, passed = self.graph.nodes[index], list[ShardingSpec]()
        for value, result in zip(node.inputs, node.outputs, strict=True):
            at = self.settled(value, specs, choice)
            if at.partial and value in specs and not specs[value].partial:
                at = specs[value]  # a barrier before this one let it through reduced
            beside, behind = ([*self._read(v, assigned)] for v in (value, result))
            reduced = {spec for _, spec in beside if not spec.partial}
            if at.partial and reduced and not any(spec.partial for _, spec in behind):
                in_order = (spec for _, spec in sorted((*beside, *behind), key=lambda read: read[0]))
                first = next(spec for spec in in_order if not spec.partial)
                at = next((spec for _, spec in behind if spec in reduced), first)
            passed.append(at)
        return tuple(passed)

    def _read(self, value: int, assigned: Mapping[int, Placement]) -> Iterator[tuple[int, ShardingSpec]]:
        """The reads of a value by grouped operators, in order: (reader, the placement that it needs)."""
        for reader in sorted(set(self.graph.consumers.get(value, ()))):
            if reader in assigned:
                operands = zip(self.graph.nodes[reader].inputs, assigned[reader].operands, strict=True)
                yield from ((reader, spec) for operand, spec in operands if operand == value)

    def inside(self, control_join: ControlJoin, body: Body, choice: Sequence[int]) -> Layout:
        """The layout of a body, whose inputs and outputs have the placements of their ports."""
        _, placements = self.placed(choice)
        inputs, outputs = (
            tuple(control_join.ports[s].specs[choice[control_join.ports[s].node]] for s in ports)
            for ports in (body.inputs, body.outputs)
        )
        return Layout(inputs=inputs, placements=placements, outputs=outputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Assembly:
    """A sharding problem with what its nodes stand for; with `regather`, weights are gathered at every use.

    `groups` maps (number of the subproblem, value, whether its readers gather it again for the backward pass) to edge
    groups. With state that may be offloaded (`idle`, input positions by node), a node has each strategy twice: as in
    `on_device`, which is the same problem without offloading, and once more with those inputs in the host's memory
    between steps.
    """

    mesh: Mesh
    root: Subproblem
    problem: ShardingProblem
    state_pairs: StatePairs
    regather: bool
    groups: Mapping[tuple[int, int, bool], int]
    idle: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    on_device: Assembly | None = None

    def placements_of(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The strategies of an answer in the problem without offloading: their placements alone."""
        return tuple(c % self._strategies(node) if node in self.idle else c for node, c in enumerate(choice))

    def offloaded(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The inputs, by position, that an answer leaves in the host's memory between steps."""
        away = [inputs for node, inputs in self.idle.items() if choice[node] >= self._strategies(node)]
        return tuple(sorted(position for inputs in away for position in inputs))

    def offloading(self, choice: Sequence[int], nodes: Collection[int]) -> tuple[int, ...]:
        """The answer with the same placements, and the idle state of these nodes alone in the host's memory."""
        placed = self.placements_of(choice)
        return tuple(c + self._strategies(node) if node in nodes else c for node, c in enumerate(placed))

    def _strategies(self, node: int) -> int:
        """The number of different placements among the strategies of a node, offloaded or not."""
        return len(self.problem.seconds[node]) // 2

    def layout(self, choice: Sequence[int]) -> Layout:
        """The placements of everything under an answer."""
        graph, choice = self.root.graph, self.placements_of(choice)
        specs, placements = self.root.placed(choice)
        inputs = tuple(specs[value] for value in graph.inputs)
        back = dict(self.state_pairs)
        outputs = tuple(
            inputs[back[o]]
            if o in back
            else full_target(graph.types[v], self.root.settled(v, specs, choice), Resharder(self.mesh))
            for o, v in enumerate(graph.outputs)
        )
        return Layout(inputs=inputs, placements=placements, outputs=outputs)


def stacked(spec: ShardingSpec, port_use: PortUse) -> ShardingSpec:
    """The placement of a stacked array, given that of its slices: its first dimension is never cut."""
    return replace(spec, dims=((), *spec.dims)) if port_use.stacked else spec


def full_target(type: TensorType, spec: ShardingSpec, resharder: Resharder) -> ShardingSpec:
    """The placement without partial axes that is cheapest to reach."""
    if not spec.partial:
        return spec
    return min(full_placements(type, resharder), key=lambda target: resharder.cost(type, spec, target))


def finish_seconds(type: TensorType, spec: ShardingSpec, resharder: Resharder, behind: Behind | None) -> float:
    """The seconds of reducing a value that leaves the program to the placement of `full_target`; 0 if it is not
    partial.
    """
    return resharder.cost(type, spec, full_target(type, spec, resharder), behind)


def full_placements(type: TensorType, resharder: Resharder) -> list[ShardingSpec]:
    """Every placement without partial axes whose axes divide the value, replicated first; typed keys are only
    replicated.
    """
    seconds = resharder.seconds(type)[0]
    every = resharder.placements(type.rank)
    if type.is_key:
        return [every[0]]
    return [spec for spec, cost in zip(every, seconds, strict=True) if not spec.partial and np.isfinite(cost)]
