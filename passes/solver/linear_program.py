"""A linear or mixed-integer program as arrays, solved by HiGHS; passes/solver/pulp_solver.py hands it to any other
solver.

Programs grow by blocks: a group of readers that turn out to disagree adds rows to what is there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from passes.errors import InternalError
from passes.solver.problem import Floats, Indices

_ITERATIONS = 200_000
_NODES = 200
_LOOKS = 150
"""Simplex iterations of a relaxation; nodes of a search, and how often it looks at its limits: work, so that an answer
does not depend on the machine's load.

The largest relaxation that is planned with, of GPT-1T, takes 9,000 iterations; what is worth branching on closes within
25 nodes. Nodes alone do not bound a search: 5 of them took 43,000 iterations, half a minute.
HiGHS tells nobody how many iterations a search has had, but looks at its limits between any two parts of its work: 150
times in about 10 s of the largest programs.
"""

_BANNER = (b"Running HiGHS", b"Includes third-party software")
_HUSHING = threading.Lock()

CUTOFF = "cutoff"
"""The status of a relaxation that was left since it takes no less than was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a solve: its status, `optimal` or the solver's own word, and `values` [columns], empty if none was
    found.

    No solution of an integer program costs less than `bound`, if the solver says so, however it ended. `duals` [rows]
    are the prices of the rows of a relaxation, empty if there are none, and `iterations` the simplex steps it took.
    """

    status: str
    objective: float
    values: Floats
    bound: float = -float("inf")
    duals: Floats = field(default_factory=lambda: np.zeros(0))
    iterations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """A basis of a relaxation, and the size of the program that it is of."""

    columns: int
    rows: int
    highs: Any


class Bases:
    """The bases at which relaxations ended last, by how their programs begin, for all problems that share one memory.

    Where budgets are the last rows, the relaxation under other budgets begins where the one before ended.
    """

    def __init__(self) -> None:
        self.ended: dict[object, tuple[Sequence[Any], Sequence[Any]]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """The first columns and rows of a program, which others of the same `key` in `bases` have, too."""

    columns: int
    rows: int
    key: object
    bases: Bases

    @property
    def basis(self) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """The states of its columns and rows where the last relaxation of such a program ended, if there was one."""
        return self.bases.ended.get((self.columns, self.rows, self.key))

    def end(self, basis: Any) -> None:
        """Keeps the basis at which a relaxation ended."""
        ended = basis.col_status[: self.columns], basis.row_status[: self.rows]
        self.bases.ended[self.columns, self.rows, self.key] = ended


@dataclass(slots=True, kw_only=True)
class LinearProgram:
    """Columns from 0 to `upper`, rows between `low` and `high`, and the minimisation of a cost over them.

    Entries are (row, column, coefficient) triplets; those of one place add up. Solvers get every place once: HiGHS
    crashes while branching if it meets one twice.
    """

    columns: int = 0
    rows: int = 0
    upper: list[Floats] = field(default_factory=list[Floats])
    low: list[Floats] = field(default_factory=list[Floats])
    high: list[Floats] = field(default_factory=list[Floats])
    entries: list[tuple[Indices, Indices, Floats]] = field(default_factory=list[tuple[Indices, Indices, Floats]])
    _highs: _Highs | None = None
    _beginning: _Beginning | None = None

    def begins(self, bases: Bases, key: object) -> None:
        """Says that all other programs of this key in `bases` begin with the columns and rows that there are so far."""
        self._beginning = _Beginning(columns=self.columns, rows=self.rows, key=key, bases=bases)

    def add_columns(self, count: int, upper: float = 1.0) -> Indices:
        """The numbers of new columns."""
        first, self.columns = self.columns, self.columns + count
        self.upper.append(np.full(count, upper))
        return np.arange(first, self.columns)

    def add_rows(self, count: int, low: float, high: float) -> Indices:
        """The numbers of new rows, empty so far."""
        first, self.rows = self.rows, self.rows + count
        self.low.append(np.full(count, low))
        self.high.append(np.full(count, high))
        return np.arange(first, self.rows)

    def enter(self, rows: Indices, columns: Indices, value: float | Floats) -> None:
        """Puts coefficients into rows."""
        self.entries.append((rows, columns, np.broadcast_to(np.asarray(value, dtype=np.float64), rows.shape)))

    def minimise(
        self,
        cost: Floats,
        integral: Indices,
        *,
        gap: float,
        seconds: float | None = None,
        prices: Floats | None = None,
        cutoff: float = float("inf"),
    ) -> Outcome:
        """The least of `cost` [columns] to a relative `gap`, within limits of work and, if given, `seconds`.

        HiGHS begins at what the first rows are thought to be worth, `prices`: the better they are, the fewer steps; or
        where the relaxation of another program that `begins` so ended. A relaxation that is `cutoff` at least ends as
        soon as that is seen. Costs of columns stay as they were; once it has been solved, a program grows by rows.
        """
        basis = None if self._highs or not self._beginning else self._beginning.basis
        self._highs = self._highs or _Highs(np.zeros(0) if prices is None else prices)
        outcome = self._highs.minimise(self, cost, integral, gap, np.inf if seconds is None else seconds, cutoff, basis)
        if self._beginning and outcome.status == "optimal":
            self._beginning.end(self._highs.highs.getBasis())
        return outcome

    @property
    def basis(self) -> Basis:
        """The basis at which the last relaxation ended."""
        assert self._highs is not None
        return Basis(columns=self.columns, rows=self.rows, highs=self._highs.highs.getBasis())

    def limit(self, upper: Floats, basis: Basis | None = None) -> None:
        """Gives the first columns other upper limits; the next relaxation starts at `basis`, or where it is.

        A basis of a program that has grown since is left aside.
        """
        assert self._highs is not None
        self._beginning = None  # a part of the answers is no start for all of them
        columns = np.arange(upper.size, dtype=np.int32)
        self._highs.highs.changeColsBounds(upper.size, columns, np.zeros(upper.size), upper)
        if basis is not None and (basis.columns, basis.rows) == (self.columns, self.rows):
            self._highs.highs.setBasis(basis.highs)

    def bounds(self) -> tuple[Floats, Floats, Floats]:
        """The upper limits of columns, and the limits of rows."""
        return _joined(self.upper), _joined(self.low), _joined(self.high)

    def triplets(self) -> tuple[Indices, Indices, Floats]:
        """All entries, by column, none twice."""
        rows, columns, values = (_joined([entry[part] for entry in self.entries]) for part in range(3))
        return _summed(rows.astype(np.intp), columns.astype(np.intp), values)


def _summed(rows: Indices, columns: Indices, values: Floats) -> tuple[Indices, Indices, Floats]:
    """Triplets by column and row, those of one place as their sum."""
    if not rows.size:
        return rows, columns, values
    order = np.lexsort((rows, columns))
    rows, columns, values = rows[order], columns[order], values[order]
    first = np.ones(rows.size, dtype=np.bool_)
    first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    return rows[first], columns[first], np.add.reduceat(values, np.flatnonzero(first))


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)


def hush() -> None:
    """Keeps HiGHS from printing its banner.

    From 1.16 on its first model of a process does so on stdout, whatever the options say, where a page of JSON may be.
    """
    with _HUSHING:
        _hush()


@functools.cache
def _hush() -> None:
    if sys.stdout:
        sys.stdout.flush()
    # Without a file to print to, or with a stdout that is closed, the banner goes where it will.
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as page:
        stdout = os.dup(1)
        os.dup2(page.fileno(), 1)
        try:
            highspy.Highs()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        page.seek(0)
        for line in page:  # of other threads, too
            if not line.startswith(_BANNER):
                os.write(1, line)


class _Highs:
    """A HiGHS model of a program. Reference: Huangfu and Hall, Math. Prog. Comp. 10 (2018).

    It is stated at costs less the `worth` of its first rows, at which the relaxation starts; what the program has grown
    by is added, and the next relaxation starts where the last one ended.
    """

    def __init__(self, worth: Floats) -> None:
        hush()
        self.highs: Any = highspy.Highs()
        self.highs.cbMipInterrupt.subscribe(self._look)
        self.looks, self.is_left = 0, False
        self.worth = worth
        self.columns = self.rows = self.entries = 0

    def _look(self, event: Any) -> None:
        """Ends a search that has looked at its limits often enough, or that nobody waits for any more."""
        self.looks += 1
        event.interrupt(self.is_left or self.looks > _LOOKS)

    def _run(self) -> None:
        """Runs HiGHS on a thread of its own; what a signal's handler raises meanwhile ends it, and is raised here.

        Handlers run on the main thread, where HiGHS would call `_look`, and drop what is raised there. And a thread on
        which HiGHS has run keeps its scheduler, whose number of threads no later model may change: one of the caller's
        would fail here, or fail after this one (HiGHS 1.16).
        """
        thread = threading.Thread(target=self.highs.run, name="HiGHS", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:
            self.is_left = True
            thread.join()
            raise

    def minimise(
        self,
        program: LinearProgram,
        cost: Floats,
        integral: Indices,
        gap: float,
        seconds: float,
        cutoff: float,
        basis: tuple[Sequence[Any], Sequence[Any]] | None,
    ) -> Outcome:
        """The least of `cost`; a relaxation ends where it is `cutoff` at least. The first begins at a `basis`, if it is
        given one.
        """
        highs = self.highs
        limit = highs.getRunTime() + seconds
        options: dict[str, object] = {"output_flag": False, "threads": 1, "time_limit": limit, "mip_rel_gap": gap}
        options |= {"simplex_iteration_limit": _ITERATIONS, "mip_max_nodes": _NODES}
        if not integral.size:
            # Its presolve runs on for ever on some relaxations (HiGHS 1.12 to 1.15, 835 columns, no time limit heeded).
            options |= {"presolve": "off", "objective_bound": cutoff}
        for name, value in options.items():
            highs.setOptionValue(name, value)
        if self.columns:
            self._grow(program, cost)
        else:
            self._state(program, cost, integral)
            if basis:
                self._begin(program, *basis)
        self.columns, self.rows, self.entries = program.columns, program.rows, len(program.entries)
        self.looks, self.is_left = 0, False
        self._run()
        status = _HIGHS_STATUS.get(highs.getModelStatus(), "failed")
        duals = np.zeros(0) if integral.size else self._duals(program)
        if status == CUTOFF:
            return Outcome(status=status, objective=cutoff, values=np.zeros(0), duals=duals)
        kind = highs.getInfo().primal_solution_status
        feasible = kind == int(highspy.SolutionStatus.kSolutionStatusFeasible.value)
        values = np.array(highs.getSolution().col_value) if feasible else np.zeros(0)
        objective = float(values @ cost) if feasible else float("inf")
        bound = float(highs.getInfo().mip_dual_bound) if integral.size and status != "failed" else -np.inf
        iterations = max(0, int(highs.getInfo().simplex_iteration_count))
        return Outcome(
            status=status, objective=objective, values=values, bound=bound, duals=duals, iterations=iterations
        )

    def _duals(self, program: LinearProgram) -> Floats:
        """The prices of the rows: those assumed, and those that the relaxation adds."""
        solution = self.highs.getSolution()
        duals = np.array(solution.row_dual) if solution.dual_valid else np.zeros(0)
        duals = duals if duals.size == program.rows else np.zeros(program.rows)
        return duals + np.concatenate([self.worth, np.zeros(program.rows - self.worth.size)])

    def _state(self, program: LinearProgram, cost: Floats, integral: Indices) -> None:
        """The whole program."""
        rows, columns, values = program.triplets()
        low = _joined(program.low)
        worth = np.concatenate([self.worth, np.zeros(program.rows - self.worth.size)])
        kinds = np.zeros(program.columns, dtype=np.int32)
        kinds[integral] = int(highspy.HighsVarType.kInteger.value)
        self.highs.passModel(
            program.columns,
            program.rows,
            values.size,
            int(highspy.MatrixFormat.kColwise.value),
            int(highspy.ObjSense.kMinimize.value),
            float(worth[worth != 0] @ low[worth != 0]),
            cost - np.bincount(columns, weights=values * worth[rows], minlength=program.columns),
            np.zeros(program.columns),
            _joined(program.upper),
            low,
            _joined(program.high),
            _starts(columns, program.columns),
            rows.astype(np.int32),
            values,
            kinds,
        )

    def _begin(self, program: LinearProgram, columns: Sequence[Any], rows: Sequence[Any]) -> None:
        """Has HiGHS begin where the first columns and rows have these states; it mends what is no basis."""
        basis, states = highspy.HighsBasis(), highspy.HighsBasisStatus
        basis.col_status = [*columns, *[states.kLower] * (program.columns - len(columns))]
        basis.row_status = [*rows, *[states.kBasic] * (program.rows - len(rows))]
        basis.valid = basis.alien = True
        self.highs.setBasis(basis)

    def _grow(self, program: LinearProgram, cost: Floats) -> None:
        """The new columns, and the rows that all new entries stand in."""
        new = program.entries[self.entries :]
        rows, columns, values = _summed(*(_joined([entry[part] for entry in new]) for part in range(3)))
        order = np.argsort(rows, kind="stable")
        if rows.size and rows[order[0]] < self.rows:
            raise InternalError(f"an entry of row {rows[order[0]]} after the program was solved with it")
        more, none = program.columns - self.columns, np.zeros(0, dtype=np.int32)
        upper = _joined(program.upper)[self.columns :]
        self.highs.addCols(
            more, cost[self.columns :], np.zeros(more), upper, 0, np.zeros(more, dtype=np.int32), none, np.zeros(0)
        )
        more = program.rows - self.rows
        low, high = (_joined(limits)[self.rows :] for limits in (program.low, program.high))
        starts = _starts(rows - self.rows, more)[:-1]
        self.highs.addRows(more, low, high, values.size, starts, columns[order].astype(np.int32), values[order])


def _starts(places: Indices, count: int) -> NDArray[np.int32]:
    """The start of the entries of each of so many places in a list sorted by place, and the end of the last ones."""
    return np.concatenate([[0], np.cumsum(np.bincount(places.astype(np.intp), minlength=count))]).astype(np.int32)


_HIGHS_STATUS = {
    highspy.HighsModelStatus.kOptimal: "optimal",
    highspy.HighsModelStatus.kInfeasible: "infeasible",
    highspy.HighsModelStatus.kUnboundedOrInfeasible: "infeasible",
    highspy.HighsModelStatus.kTimeLimit: "time limit",
    highspy.HighsModelStatus.kIterationLimit: "work limit",
    highspy.HighsModelStatus.kSolutionLimit: "work limit",
    highspy.HighsModelStatus.kInterrupt: "work limit",
    highspy.HighsModelStatus.kObjectiveBound: CUTOFF,
}
