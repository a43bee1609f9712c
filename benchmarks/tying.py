"""Answers, bounds and seconds of small problems, with equal nodes tied and apart: `python -m benchmarks.tying --help`.

`SolverOptions(untied=...)` is the size from which on equal nodes are tied: where that saves more time than its answers
and bounds lose. Both ways are compared after the relaxation is solved, rounded and bounded, as what closes the gap
after that is the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from rich.table import Table

import autopar
from benchmarks.console import stdout
from benchmarks.networks import drawn
from benchmarks.optimality import CLUSTERS
from benchmarks.proof import problems
from passes.cluster import parse_cluster
from passes.solver import Answer, ShardingProblem, SolverOptions, solve


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A problem of so many `edges`, its answers `tied` and `apart`, and the seconds of CPU of each."""

    name: str
    edges: int
    tied: Answer
    apart: Answer
    tied_cpu: float
    apart_cpu: float

    @property
    def costlier(self) -> float:
        """The extra cost of the tied answer, as a share."""
        return self.tied.objective / self.apart.objective - 1

    @property
    def lower(self) -> float:
        """The loss of the tied bound, as a share."""
        return 1 - self.tied.bound / self.apart.bound if self.apart.bound > 0 else 0.0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tying",
        description="Solve the relaxations of random networks (benchmarks.networks) with equal nodes tied and apart: "
        "edges, seconds of CPU, how much more the tied answer costs and how much lower its bound is, largest first.",
    )
    parser.add_argument(
        "--seed", default=1, type=int, metavar="N", help="of the random networks (default: %(default)s)"
    )
    parser.add_argument("--first", default=0, type=int, metavar="N", help="number of the first network (default: 0)")
    parser.add_argument("--count", default=20, type=int, metavar="N", help="networks (default: %(default)s)")
    parser.add_argument("--cluster", default=CLUSTERS[0], metavar="A", help="(default: %(default)s)")
    return parser.parse_args(argv)


def timed(problem: ShardingProblem, options: SolverOptions) -> tuple[Answer, float]:
    """The answer that a relaxation leads to, and its seconds of CPU."""
    began = time.process_time()
    answer = solve(problem, options, close=False)
    return answer, time.process_time() - began


def pairs(seed: int, numbers: Iterable[int], cluster: str) -> list[Pair]:
    """The problems of the networks of those numbers on every mesh."""
    every_pair: list[Pair] = []
    for number in numbers:
        design = drawn(seed, number)
        network = design.network()
        step = autopar.parallelize(network.step, cluster=cluster, donate_argnums=(0,)).step(
            network.state, network.batch
        )
        for problem in problems(step, parse_cluster(cluster)):
            tied, tied_cpu = timed(problem, SolverOptions(untied=0))
            apart, apart_cpu = timed(problem, SolverOptions(tie_radius=None))
            edges = len(problem.edges)
            every_pair.append(
                Pair(name=str(design), edges=edges, tied=tied, apart=apart, tied_cpu=tied_cpu, apart_cpu=apart_cpu)
            )
    return every_pair


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the command line asks for."""
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    every_pair = sorted(
        pairs(args.seed, range(args.first, args.first + args.count), args.cluster), key=lambda pair: -pair.edges
    )
    table = Table("network", title="equal nodes tied and apart", title_justify="left", padding=(0, 0))
    for name in ("edges", "tied, CPU", "apart, CPU", "tied costs more", "bound lower by"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in every_pair:
        seconds = (f"{cpu:.2f} s" for cpu in (pair.tied_cpu, pair.apart_cpu))
        table.add_row(pair.name, str(pair.edges), *seconds, *(f"{100 * x:.2g} %" for x in (pair.costlier, pair.lower)))
    console = stdout()
    console.print(table)
    for name, heading in (
        ("tied_cpu", "tied, CPU seconds"),
        ("apart_cpu", "apart, CPU seconds"),
        ("costlier", "tied costs more, share"),
        ("lower", "bound lower by, share"),
    ):
        values = [getattr(pair, name) for pair in every_pair]
        console.print(
            f"{heading}: median {np.median(values):.3g}, 95 % {np.percentile(values, 95):.3g}, worst {max(values):.3g}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
