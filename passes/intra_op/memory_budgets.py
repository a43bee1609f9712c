"""Memory budgets of a sharding problem: the bytes that are live at one node of the program, under every strategy.

A plan that needs too much is forbidden by a budget at its peak node, and the problem is solved again, so that only
budgets that bind are ever stated. Values count from where they are made. Gradients that the apply phase reads count in
the placement of their reader, since they are brought there at once. Resharded copies count from their first reader to
their last; the body of a loop counts at its own peak node. Working space of operators is left out of budgets, and taken
to shrink with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from passes.cluster import Mesh
from passes.intra_op.assembly import Assembly, ControlJoin, Subproblem
from passes.intra_op.peak_node import NodePath
from passes.ir import phase
from passes.sharding import ShardingSpec
from passes.solver import Budget, Edge, ShardingProblem


def budget(problem: ShardingProblem, row: Budget, choice: Sequence[int], nbytes: float, limit: float) -> Budget:
    """The row at a node, with a limit that rules out `choice`: its plan needs `nbytes` there, of which it may have
    `limit`.
    """
    used = problem.usage(row, choice)
    return replace(row, limit=max(limit - (nbytes - used), used * limit / nbytes))


def live(assembly: Assembly, at: NodePath, limit: float) -> Budget:
    """The row of all values that are live at a node, in and around the loops and branches that it is in; at most
    `limit` bytes.
    """
    row = Budget(nbytes={}, copies={}, limit=limit)
    subproblem, away = assembly.root, frozenset[int]()
    for depth, (point, body) in enumerate(at):
        _Live(assembly, subproblem, point, away, row).hold(whole=depth == 0)
        if body >= 0:
            control_join = subproblem.control_joins[point]
            subproblem, away = control_join.bodies[body], _unsliced(control_join, body)
    return row


def resident(assembly: Assembly, limit: float) -> Budget:
    """The row of the arguments, which are on the device for the whole step.

    Any compiler needs these bytes. Rows of `live` values are estimates, which also count values that compilers make
    anew.
    """
    row = Budget(nbytes={}, copies={}, limit=limit)
    _Live(assembly, assembly.root, 0, frozenset(), row).hold_arguments()
    return row


def _unsliced(control_join: ControlJoin, body: int) -> frozenset[int]:
    """The inputs of a body that are arrays of the program around it as they are, not slices of them."""
    sliced = {port_use.port for port_use in control_join.control.operands if port_use.stacked}
    inside = control_join.control.bodies[body]
    return frozenset(v for v, port in zip(inside.graph.inputs, inside.inputs, strict=True) if port not in sliced)


class _Live:
    """The values of one subproblem that are live when one of its nodes runs, as entries of a row.

    Values in `away` take no bytes of their own.
    """

    def __init__(
        self, assembly: Assembly, subproblem: Subproblem, point: int, away: frozenset[int], row: Budget
    ) -> None:
        self.assembly = assembly
        self.away = away
        self.point = point
        self.subproblem = subproblem
        self.graph = subproblem.graph
        self.mesh: Mesh = assembly.mesh
        self.readers = _readers(subproblem)
        self.nbytes, self.copies = row.nbytes, row.copies

    def hold(self, *, whole: bool) -> None:
        """Adds the live values to the row; inputs of the `whole` program are live as long as it runs."""
        late = {v for v in self.readers if self._is_gradient(v)}
        for value, site in self.subproblem.sites.items():
            if value not in late and value not in self.away and self._is_live(value, whole=whole):
                self._hold(site.node, value, site.specs)
        for (number, value, again), group in self.assembly.groups.items():
            if number != self.subproblem.number or not (edges := self.assembly.problem.groups.get(group)):
                continue
            if value in late:
                self._hold_gradient(value, edges, whole=whole)
            elif self._is_copied(value, again=again):
                labels = dict.fromkeys(label for edge in edges for label in edge.labels)  # in an order of their own
                self.copies[group] = {s: self._local(value, s) for s in labels if isinstance(s, ShardingSpec)}

    def hold_arguments(self) -> None:
        """Adds the inputs of the program to the row."""
        arguments = set(self.graph.inputs)
        for value, site in self.subproblem.sites.items():
            if value in arguments:
                self._hold(site.node, value, site.specs)

    def _local(self, value: int, spec: ShardingSpec) -> float:
        return float(spec.local_nbytes(self.graph.types[value], self.mesh))

    def _hold(self, node: int, value: int, specs: Sequence[ShardingSpec]) -> None:
        """Adds the bytes of a value under each strategy of the node that decides it."""
        nbytes_of: dict[ShardingSpec, float] = {}
        nbytes = np.array([nbytes_of.setdefault(spec, self._local(value, spec)) for spec in specs])
        self.nbytes[node] = self.nbytes[node] + nbytes if node in self.nbytes else nbytes

    def _is_live(self, value: int, *, whole: bool) -> bool:
        """Whether a value is live at this node."""
        if value not in self.graph.producers and whole:
            return True
        producer = self.graph.producers.get(value, 0)
        last = max(self.readers.get(value, ()), default=producer)
        return producer <= self.point <= (len(self.graph.nodes) if value in self.graph.returned else last)

    def _is_gradient(self, value: int) -> bool:
        """Whether a value is made by the backward pass and read by the apply phase alone."""
        producer = self.graph.producers.get(value)
        if producer is None or phase(self.graph.nodes[producer]) != "backward":
            return False
        readers = self.readers[value]
        return bool(readers) and all(phase(self.graph.nodes[r]) == "apply" for r in readers)

    def _hold_gradient(self, value: int, edges: Sequence[Edge], *, whole: bool) -> None:
        """Adds a gradient in the placement in which its last reader needs it."""
        if not self._is_live(value, whole=whole):
            return
        edge = edges[-1]
        sizes = np.array([self._local(value, s) if isinstance(s, ShardingSpec) else 0.0 for s in edge.labels])
        nbytes = sizes[edge.after]
        self.nbytes[edge.target] = self.nbytes[edge.target] + nbytes if edge.target in self.nbytes else nbytes

    def _is_copied(self, value: int, *, again: bool) -> bool:
        """Whether resharded copies of a value may be live here: between the first and the last reader of a copy.

        Copies that are made `again` for the backward pass have the readers there.
        """
        readers = [r for r in self.readers.get(value, ()) if not again or phase(self.graph.nodes[r]) == "backward"]
        return bool(readers) and min(readers) <= self.point <= max(readers)


def _readers(subproblem: Subproblem) -> Mapping[int, Sequence[int]]:
    """The nodes that read each value, directly or through an alias."""
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(subproblem.graph.nodes):
        for value in _named(subproblem, node.inputs):
            readers.setdefault(value, []).append(index)
    return readers


def _named(subproblem: Subproblem, values: Sequence[int]) -> Iterator[int]:
    """The values, and all values that are aliases of them."""
    for value in values:
        yield value
        if (root := subproblem.grouping.roots.get(value, value)) != value:
            yield root
