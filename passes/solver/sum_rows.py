"""The reductions of a sum that several readers want, as rows of a program of whole strategies.

With y_i for whether the sum is made in placement i, h_{i,j} for whether it is reduced from there to j, v_{j,k} for
whether it is brought from there to k, and d_{i,k} for whether it is brought to k, a sum as well, as it was made:

    sum_j h_{i,j} <= y_i      v_{j,k} <= sum_i h_{i,j}      d_{i,k} <= y_i
    sum_i e_{r,i,k} <= sum_i h_{i,k} + sum_j v_{j,k} + sum_i d_{i,k}                  for every reader r and k

A plan reduces it to what its first reader wants; here it may be to what any of them wants, which costs no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.solver.edge_flows import Flow
from passes.solver.linear_program import LinearProgram
from passes.solver.problem import Floats, Indices, Sums


def add_sum(
    readers: Sequence[Flow], sums: Sums, made: Indices, strategies: Indices, program: LinearProgram
) -> list[tuple[Indices, Floats]]:
    """Adds the reductions of a group of `readers` to a program: their columns, and seconds.

    `made` are the placements that the source makes under each of its `strategies`, columns of the program.
    """
    weight = readers[0].edge.weight
    direct = np.full((readers[0].edge.seconds.shape[0], sums.ends.size), np.inf)
    for flow in readers:
        assert flow.edge.sums is not None
        direct[:, flow.edge.sums.names] = weight * flow.edge.seconds
    rows = np.unique(made[sums.rows[made]])
    reader_columns = [_wanted(flow, sums) for flow in readers]
    names = np.unique(np.concatenate([name for name, _ in reader_columns]))
    if not names.size:
        return []
    h_row, h_name = np.nonzero(np.isfinite(direct[rows]) & sums.ends & np.isin(np.arange(sums.ends.size), names))
    d_row, d_name = np.nonzero(np.isfinite(direct[rows]) & ~sums.ends & (direct[rows] > 0))
    onward = weight * sums.onward
    v_from, v_name = np.nonzero(np.isfinite(onward) & sums.ends[:, None] & (onward > 0))
    used = np.isin(v_from, names) & np.isin(v_name, names)
    v_from, v_name = v_from[used], v_name[used]
    h, v, d = (program.add_columns(part.size) for part in (h_name, v_name, d_name))
    for number, row in enumerate(rows.tolist()):
        making = strategies[made == row]
        _most(program, h[h_row == number], making)
        for column in d[d_row == number]:
            _most(program, np.array([column]), making)
    for column, name in zip(v, v_from, strict=True):
        _most(program, np.array([column]), h[h_name == name])
    for name_of, columns in reader_columns:
        for name in np.unique(name_of).tolist():
            have = np.concatenate([h[h_name == name], v[v_name == name], d[d_name == name]])
            _most(program, columns[name_of == name], have)
    return [(h, direct[rows[h_row], h_name]), (v, onward[v_from, v_name]), (d, direct[rows[d_row], d_name])]


def _wanted(flow: Flow, sums: Sums) -> tuple[Indices, Indices]:
    """The names of what a reader may want of a sum, and the variables of that."""
    assert flow.edge.sums is not None
    moved = sums.rows[flow.shape.before] & (flow.shape.seconds > 0)
    return flow.edge.sums.names[flow.shape.after[moved]], flow.columns[moved]


def _most(program: LinearProgram, columns: Indices, limit: Indices) -> None:
    """Adds the row that some columns are together at most what others are."""
    row = program.add_rows(1, -np.inf, 0.0)
    for some, sign in ((columns, 1.0), (limit, -1.0)):
        program.enter(np.repeat(row, some.size), some, sign)
