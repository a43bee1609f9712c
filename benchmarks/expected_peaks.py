"""Ratios of expected to real peak bytes of hand-made plans: `python -m benchmarks.expected_peaks --help`.

Under a memory limit the search first leaves out the hand-made plans whose expected peak is above the limit by more than
the factor `passes.intra_op.hand_made.SURELY`. Expected is the least that may be live at the node where the first answer
had its peak, times that answer's peak divided by what was live there. A plan that just fits is left out wrongly where
its ratio of expected to real bytes is above the factor; the factor is to keep the share of such plans small.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import jax
import numpy as np
import optax
from rich.table import Table

import autopar
from benchmarks.console import stdout
from benchmarks.trainings import MODELS, Model, make_state, make_step
from passes.cluster import Cluster, parse_cluster
from passes.errors import PlanningError
from passes.intra_op import MeshProblems, MeshSearch, layouts, restrictions
from passes.intra_op.hand_made import SURELY
from passes.solver import SolverOptions, solve
from passes.step import Step, Variant

CLUSTERS = ("4:cpu", "2x2:a100-80g")
"""Clusters whose compilers lay memory out in different ways."""

VARIANTS: Mapping[str, Variant] = {"as it is": Variant(), "microbatches": Variant(microbatches=2)}
ROUGHLY = SolverOptions(gap=1e-2)
FACTORS = (1.1, 1.25, SURELY, 2.0)
"""The factor in use and others that it might be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The ratios of expected to real peak bytes of the hand-made plans of a variant of a model, over all meshes."""

    model: str
    cluster: str
    variant: str
    ratios: tuple[float, ...]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expected_peaks",
        description="Print ratios of the peak bytes expected of hand-made plans to their real ones: quantiles by "
        "model, and how many plans each factor would leave out of a search though they just fit.",
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="again for more (default: all)")
    parser.add_argument(
        "--cluster", action="append", metavar="TEXT", help=f"again for more (default: {', '.join(CLUSTERS)})"
    )
    parser.add_argument(
        "--large", action="store_true", help="models in the sizes that are measured, not in the least ones"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, a line each")
    return parser.parse_args(argv)


def step_of(model: Model, *, large: bool) -> Step:
    """The Adam step of a model, from shapes alone."""
    config, batch_size = (model.config, model.batch) if large else (model.least, model.least_batch)
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(partial(make_state, model.module, config, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(model.module.example_batch, config, batch_size), jax.random.key(0))
    return autopar.parallelize(make_step(model.module, config, optimizer), donate_argnums=0).step(state, batch)


def ratios(step: Step, cluster: Cluster) -> Iterator[float]:
    """The ratio of expected to real peak bytes of each hand-made plan on each mesh, once the first answer is known."""
    problems = MeshProblems(step=step)
    search = MeshSearch(planner="expected", problems=problems, options=ROUGHLY)
    search.over(layouts(cluster, cluster.n_devices, 2))
    problems.look(search.solved[0], 0)
    for solved in search.solved:
        for restrict, regather in restrictions.hand_made_plans(solved.assembly.mesh):
            base = problems.twin(solved) if regather else solved
            if base is None:
                continue
            try:
                restricted = restrict(base.assembly)
                answer = solve(restricted.problem, ROUGHLY, close=False)
            except PlanningError:  # not possible there: a batch that the axis does not divide, say
                continue
            expected = problems.expected_nbytes(base, restricted)
            yield expected / problems.peak(base, answer.choice).nbytes


def rows(models: Sequence[str], clusters: Sequence[str], *, large: bool) -> Iterator[Row]:
    """A row for each variant that a model has, on each cluster."""
    for model in models:
        step = step_of(MODELS[model], large=large)
        for name, variant in VARIANTS.items():
            try:
                rewritten = step.variant(variant)
            except PlanningError:  # it has no batch
                continue
            for cluster in clusters:
                of_plans = tuple(ratios(rewritten, parse_cluster(cluster)))
                yield Row(model=model, cluster=cluster, variant=name, ratios=of_plans)


def table(made: Sequence[Row]) -> Table:
    """Quantiles of the ratios by model and cluster, and how many plans each factor would leave out."""
    columns = ("model", "cluster", "plans", "least", "median", "95 %", "most", *(f"> {factor:g}" for factor in FACTORS))
    printed = Table(*columns, title="expected / real peak bytes of hand-made plans", title_justify="left")
    by_model: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in made:
        by_model[row.model, row.cluster] += row.ratios
        by_model["all", ""] += row.ratios
    by_model["all", ""] = by_model.pop(("all", ""), [])
    for (model, cluster), several in by_model.items():
        if several:
            quantiles = np.quantile(several, (0.0, 0.5, 0.95, 1.0))
            beyond = (sum(ratio > factor for ratio in several) for factor in FACTORS)
            printed.add_row(model, cluster, str(len(several)), *(f"{q:.2f}" for q in quantiles), *map(str, beyond))
    return printed


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the command line asks for."""
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    made: list[Row] = []
    for row in rows(args.model or list(MODELS), args.cluster or CLUSTERS, large=args.large):
        made.append(row)
        if args.json:
            print(json.dumps(asdict(row)), flush=True)
    if not args.json:
        stdout().print(table(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
