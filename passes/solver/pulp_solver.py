"""The integer program through PuLP, by any solver that its user has: CBC, HiGHS, SCIP, Gurobi, CPLEX, COPT and others.

PuLP builds a model term by term, which is slower than the planner's own search, and the whole program is put into it:
no equal layers are made one, and nothing is left out. It is the door for other solvers and their licences, and a second
opinion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pulp

from passes.errors import PlanningError, explain
from passes.solver.linear_program import Indices, LinearProgram, Outcome, hush
from passes.solver.problem import Floats


def solver_named(name: str, *, seconds: float | None, gap: float) -> Any:
    """PuLP's solver of a name, in any case and without PuLP's affixes: `cbc` is `PULP_CBC_CMD`.

    Raises PlanningError, with the names of those that are here, if PuLP does not find it.
    """
    names = pulp.listSolvers()
    available = pulp.listSolvers(onlyAvailable=True)
    lower_name = name.lower()
    matching = [candidate for candidate in names if lower_name in (candidate.lower(), _plain(candidate))]
    usable = [candidate for candidate in matching if candidate in available]
    if not usable:
        rule = "PuLP does not find this solver" if matching else "PuLP knows no solver of this name"
        remedy = (
            f"install it, or name one that is here: {', '.join(sorted(available))}; None for the planner's own search"
        )
        raise PlanningError(explain(f"SolverOptions(solver={name!r})", rule, "", remedy))
    limits = {} if seconds is None else {"timeLimit": seconds}
    return pulp.getSolver(usable[0], msg=False, gapRel=gap, **limits)


def _plain(name: str) -> str:
    return name.lower().removeprefix("pulp_").removesuffix("_cmd").removesuffix("_py").removesuffix("_dll")


def minimise(program: LinearProgram, cost: Floats, integral: Indices, solver: Any) -> Outcome:
    """The least of `cost` [columns] with integers in the `integral` columns, by a solver of PuLP."""
    model: Any = pulp.LpProblem("intra_op", pulp.LpMinimize)
    upper, low, high = program.bounds()
    bounds = (None if np.isinf(bound) else float(bound) for bound in upper)
    variables: list[Any] = [model.add_variable(f"x{i}", 0.0, bound) for i, bound in enumerate(bounds)]
    for column in integral.tolist():
        variables[column].cat = pulp.LpInteger
    terms: list[list[Any]] = [[] for _ in range(program.rows)]
    rows, columns, values = program.triplets()
    for row, column, value in zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True):
        terms[row].append((variables[column], value))
    model.setObjective(pulp.LpAffineExpression(list(zip(variables, cost.tolist(), strict=True))))
    for row, row_low, row_high in zip(terms, low.tolist(), high.tolist(), strict=True):
        total = pulp.LpAffineExpression(row)
        model.addConstraint(
            total == row_low if row_low == row_high else total >= row_low if np.isinf(row_high) else total <= row_high
        )
    hush()  # HiGHS may be PuLP's solver too
    try:
        model.solve(solver)
    except pulp.PulpSolverError as error:
        rule = f"the solver ended without an answer: {error}"
        raise PlanningError(explain(f"solver {solver.name}", rule, "", "try another solver, or None")) from error
    status = str(pulp.LpStatus[model.status]).lower()
    # PuLP calls a program that ran out of time optimal too; only the status of its solution tells them apart.
    if model.status == pulp.LpStatusOptimal and model.sol_status != pulp.LpSolutionOptimal:
        status = "time limit"
    solved: list[float | None] = [variable.value() for variable in variables]
    has_values = status in ("optimal", "time limit") and any(value is not None for value in solved)
    column_values = np.array([value or 0.0 for value in solved]) if has_values else np.zeros(0)
    return Outcome(
        status=status, objective=float(column_values @ cost) if has_values else float("inf"), values=column_values
    )
