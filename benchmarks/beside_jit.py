"""A planned step on virtual CPU devices, timed by autopar's program and by `jax.jit` under the same shardings."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import autopar
from benchmarks.baselines import sharded
from benchmarks.console import stdout
from benchmarks.equality import difference
from benchmarks.timing import interleaved, ratio
from benchmarks.trainings import Training
from benchmarks.zoo import placed, planned


def beside_jit(case: Training, devices: int, rounds: int, planner: autopar.Planner) -> tuple[tuple[str, ...], float]:
    """The cells of a table (median steps by jit and by autopar, their ratio, its interval, the largest relative
    difference of results), and that difference.
    """
    by_jit = jax.jit(case.step)(case.state, case.batch)
    compiled = planned(case, f"{devices}:cpu", planner)
    worst = difference(compiled(jax.tree.map(jnp.copy, case.state), case.batch), by_jit)
    runners = {
        "jit": sharded(case, compiled.input_shardings[0], compiled.output_shardings),
        "autopar": placed(compiled, case),
    }
    seconds = interleaved(runners, rounds)
    median, (low, high) = ratio(seconds, "autopar", "jit")
    times = (f"{np.median(seconds[runner]) * 1e3:.2f} ms" for runner in runners)
    return (*times, f"{median:.2f}", f"{low:.2f}-{high:.2f}", f"{worst:.0e}"), worst


def print_rows(title: str, names: Sequence[str], rows: Sequence[tuple[tuple[str, ...], float]], bound: float) -> bool:
    """Whether the results of any row differ by more than the bound, or by NaN; prints the rows.

    A row is its cells, the first of them under `names` and then those of `beside_jit`, and its largest difference.
    """
    shown = Table(title=title, title_justify="left")
    for name in (*names, "jit", "autopar", "ratio", "95 %", "differs"):
        shown.add_column(name, justify="right")
    for cells, _ in rows:
        shown.add_row(*cells)
    stdout().print(shown)
    return not all(worst <= bound for _, worst in rows)
