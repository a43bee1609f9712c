"""Resharding matrices and placements that all sharding problems on one mesh share.

Equal layers have equal operator groups, so each matrix is computed once, and found again by the identity of its
placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.intra_op.assembly import Specs, full_placements
from passes.intra_op.strategies import Table
from passes.ir import Graph, TensorType
from passes.placement import OperatorGroup
from passes.sharding import Behind, Resharder
from passes.solver import Cache, Edge, Floats, Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The resharding seconds between the placements of two nodes, as an `Edge` holds them; `free` if all are zero."""

    seconds: Floats
    before: Indices
    after: Indices
    origins: tuple[object, ...]
    labels: Specs
    free: bool

    def edge(self, source: int, target: int, group: int, weight: float) -> Edge:
        """An edge of these seconds."""
        return Edge(
            source=source,
            target=target,
            before=self.before,
            after=self.after,
            seconds=self.seconds,
            labels=self.labels,
            origins=self.origins,
            group=group,
            weight=weight,
        )

    def only(self, rows: Sequence[int]) -> Matrix:
        """The seconds from these rows alone; reshardings from other rows cost nothing."""
        number = np.full(len(self.origins), len(rows))
        number[rows] = np.arange(len(rows))
        seconds = np.vstack([self.seconds[rows], np.zeros(len(self.labels))])
        return replace(
            self,
            seconds=seconds,
            before=number[self.before],
            origins=(*[self.origins[row] for row in rows], None),
            free=not np.any(seconds > 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """The interface of a table: the values that its operator group reads and writes, with their placements under each
    strategy.
    """

    inputs: tuple[tuple[int, Specs], ...]
    makes: tuple[tuple[int, Specs], ...]
    kind: str


class SharedTables:
    """The matrices, interfaces and placements that all problems on one mesh share, computed once per resharder.

    Tuples of placements are interned, so that the many equal ones of a model's layers are compared by identity.
    """

    def __init__(self, resharder: Resharder) -> None:
        self.resharder = resharder
        self.cache = Cache()
        self._specs: dict[Specs, Specs] = {}
        self._full: dict[TensorType, Specs] = {}
        self._interfaces: dict[int, tuple[Table, Interface]] = {}
        self._matrices: dict[tuple[TensorType, int, int, Behind | None], Matrix] = {}
        self._halves: dict[tuple[TensorType, int, int, Behind | None], tuple[Matrix, Matrix]] = {}

    def interned(self, specs: Specs) -> Specs:
        """The one object that stands for all equal tuples of placements."""
        return self._specs.setdefault(specs, specs)

    def full(self, type: TensorType) -> Specs:
        """Every placement of a value of this type that has no partial axes."""
        if type not in self._full:
            self._full[type] = self.interned(tuple(full_placements(type, self.resharder)))
        return self._full[type]

    def interface(self, table: Table, graph: Graph, operator_group: OperatorGroup) -> Interface:
        """The interface of a table, computed once."""
        if id(table) not in self._interfaces:
            interface = Interface(
                inputs=tuple((position, self.interned(specs)) for position, specs in table.inputs),
                makes=tuple((position, self.interned(specs)) for position, specs in table.makes.items()),
                kind=_kind(graph, sorted(operator_group.members)),
            )
            self._interfaces[id(table)] = (table, interface)
        return self._interfaces[id(table)][1]

    def matrix(self, type: TensorType, before: Specs, after: Specs, behind: Behind | None) -> Matrix:
        """The resharding seconds between the placements of two nodes, both interned, as `Resharder.cost` has them."""
        key = (type, id(before), id(after), behind)
        if key not in self._matrices:
            sources, targets = dict.fromkeys(before), dict.fromkeys(after)
            row, column = ({spec: i for i, spec in enumerate(specs)} for specs in (sources, targets))
            seconds = self.resharder.matrix(type, tuple(sources), tuple(targets), behind)
            self._matrices[key] = Matrix(
                seconds=seconds,
                before=np.array([row[s] for s in before]),
                after=np.array([column[s] for s in after]),
                origins=self.interned(tuple(sources)),
                labels=self.interned(tuple(targets)),
                free=not np.any(seconds > 0),
            )
        return self._matrices[key]

    def halves(self, type: TensorType, before: Specs, after: Specs, behind: Behind | None) -> tuple[Matrix, Matrix]:
        """The same seconds as two matrices: from placements that are partial, and from those that are not."""
        key = (type, id(before), id(after), behind)
        if key not in self._halves:
            matrix = self.matrix(type, before, after, behind)
            origins = list(enumerate(dict.fromkeys(before)))
            sums, full = ([row for row, spec in origins if bool(spec.partial) == partial] for partial in (True, False))
            self._halves[key] = matrix.only(sums), matrix.only(full)
        return self._halves[key]


def _kind(graph: Graph, members: Sequence[int]) -> str:
    """The operators of an operator group with their types, as text; equal groups have equal texts."""
    nodes = (graph.nodes[m] for m in members)
    return "; ".join(" ".join((n.primitive, *(str(graph.types[v]) for v in (*n.inputs, *n.outputs)))) for n in nodes)
