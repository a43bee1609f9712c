"""The least linear cost over whole numbers, by HiGHS from arrays."""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from benchmarks.iopddl.graph_problem import Floats, Indices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """`lower` <= sum of values times columns <= `upper` for every row; row r has the entries from `start[r]` on."""

    start: Indices
    columns: Indices
    values: Floats
    lower: Floats
    upper: Floats


def minimise(
    costs: Floats, most: Floats, whole: int, rows: Rows, *, seconds: float, gap: float
) -> tuple[Floats | None, float]:
    """Values of columns from 0 to `most`, the first `whole` of them integral, or None, and a bound of their cost.

    The bound is infinite if no values obey the rows, and minus infinite if nothing is known in time.
    """
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = costs.size, rows.lower.size
    program.col_cost_, program.col_lower_, program.col_upper_ = costs, np.zeros(costs.size), most
    program.row_lower_, program.row_upper_ = rows.lower, rows.upper
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.num_col_, program.a_matrix_.num_row_ = costs.size, rows.lower.size
    program.a_matrix_.start_ = np.append(rows.start, rows.columns.size).astype(np.int32)
    program.a_matrix_.index_, program.a_matrix_.value_ = rows.columns.astype(np.int32), rows.values
    kinds = [highspy.HighsVarType.kInteger] * whole
    program.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (costs.size - whole)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", max(seconds, 0.05))
    solver.setOptionValue("mip_rel_gap", gap)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return None, np.inf
    info = solver.getInfo()
    bound = float(info.mip_dual_bound) if whole else float(info.objective_function_value)
    bound = bound if np.isfinite(bound) else -np.inf
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, bound
    return np.asarray(solver.getSolution().col_value, dtype=np.float64), bound
