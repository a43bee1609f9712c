"""The budgets of a sharding problem as rows of a program: bytes of strategies and copies, as shares of the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from passes.solver.edge_flows import Shapes
from passes.solver.linear_program import LinearProgram
from passes.solver.problem import Edge, Floats, Indices, ShardingProblem


class BudgetRows:
    """The `rows` of a problem's budgets in a program, and of the copies that count in them.

    Each budget is held; or, if there is a column `most`, all are exceeded by as little as that. `columns` are those of
    the nodes' `allowed` strategies.
    """

    def __init__(
        self,
        problem: ShardingProblem,
        program: LinearProgram,
        allowed: Sequence[Indices],
        columns: Sequence[Indices],
        most: Indices | None,
    ) -> None:
        self.problem, self.program = problem, program
        self.shapes = problem.cache.kept(Shapes)
        self.allowed, self.columns = allowed, columns
        self.rows: list[int] = []
        self.copy_rows: list[tuple[int, Edge, object]] = []
        copies: dict[tuple[int, object], int | None] = {}
        for budget in problem.budgets:
            row = program.add_rows(1, -np.inf, 1.0 if most is None else 0.0)
            self.rows.append(int(row[0]))
            if most is not None:
                program.enter(row, most, -1.0)
            for node, nbytes in budget.nbytes.items():
                node_columns = columns[node]
                program.enter(np.repeat(row, node_columns.size), node_columns, nbytes[allowed[node]] / budget.limit)
            for group, sizes in budget.copies.items():
                for label, size in sizes.items():
                    if (group, label) not in copies:
                        copies[group, label] = self._copied(group, label)
                    if (column := copies[group, label]) is not None:
                        program.enter(row, np.array([column]), size / budget.limit)

    def of_copies(self, duals: Floats) -> Mapping[int, Sequence[tuple[object, float]]]:
        """The value of copies to placements at the `duals` of all rows, by the `id` of the edge that needs them, where
        there is one.
        """
        worth: dict[int, list[tuple[object, float]]] = {}
        for row, edge, label in self.copy_rows:
            if duals[row]:
                worth.setdefault(id(edge), []).append((label, float(duals[row])))
        return worth

    def _copied(self, group: int, label: object) -> int | None:
        """The column that says whether some reader of a group has the value copied to a placement; None if no reader
        may need it.
        """
        readers: list[tuple[Edge, Indices, Indices]] = []
        for edge in self.problem.groups.get(group, ()):
            asking = self._placed(edge.target, edge.after, edge.labels, label)
            if asking.size:
                readers.append((edge, asking, self._placed(edge.source, edge.before, edge.origins, label)))
        if not readers:
            return None
        program = self.program
        copied = program.add_columns(1)
        for row, (edge, asking, places) in zip(program.add_rows(len(readers), 0.0, np.inf), readers, strict=True):
            for columns, value in ((copied, 1.0), (asking, -1.0), (places, 1.0)):
                program.enter(np.full(columns.size, row), columns, value)
            self.copy_rows.append((int(row), edge, label))
        return int(copied[0])

    def _placed(self, node: int, places: Indices, names: Sequence[object], name: object) -> Indices:
        """The columns of a node's strategies under which a value has a named placement."""
        named = self.shapes.numbers(names) == self.shapes.number(name)
        return self.columns[node][named[places[self.allowed[node]]]] if names else self.columns[node][:0]
