"""Plans of random networks beside proofs of the optimum: `python -m benchmarks.optimality --help`.

A plan states a gap: how far above the optimum of the cost model it may be at most. Each network is planned by default,
then the same problems are solved in other ways (`benchmarks.proof`). An answer below the bound that a plan states shows
that the bound is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from benchmarks.child import Child, CrashError
from benchmarks.console import json_text, stdout
from benchmarks.networks import Design, add_arguments, drawn
from benchmarks.proof import EXACT, Proof, problems, proven, size
from passes.cluster import parse_cluster
from passes.solver import SolverOptions
from passes.text import quantities

CLUSTERS = ("8:a100-80g", "2x4:v100-16g", "4:h100")
COUNT = 100
SECONDS = 900.0
"""The most seconds for a network and its proof; one that takes longer counts as a crash."""

GAP_BOUND = 0.01
MEDIAN_SECONDS, MOST_SECONDS = 1.0, 5.0
"""Targets: a gap of at most 1 %, in so many seconds for the median and for 95 % of networks."""

SHARED = 1e-3
"""The share by which a plan may take less than its solution: equal values of twin towers are moved once in a plan, and
are two in its problem (0.76 of 37,197 us in network 7 of seed 1611, 0.75 of 2,966 us in network 21 of seed 2625469072).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network, by what it is drawn from, and a cluster."""

    seed: int
    number: int
    cluster: str

    def __str__(self) -> str:
        return f"{self.seed}/{self.number} {drawn(self.seed, self.number)} on {self.cluster}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A plan and what is proven of its problem: an answer takes `known` seconds, none less than `least`, by `way`.

    `objective` and `bound` are the plan's own. `nodes`, `strategies` and `entries` describe the problem of its largest
    mesh, see `benchmarks.proof.Size`. `cpu` and `wall` are seconds of planning, without tracing and proof.
    """

    nodes: int
    strategies: int
    entries: float
    status: str
    step_seconds: float
    objective: float
    bound: float
    known: float
    least: float
    way: str
    cpu: float
    wall: float

    @property
    def gap(self) -> float:
        """The gap that the plan states, as a share of its objective."""
        return (self.objective - self.bound) / self.objective

    @property
    def excess(self) -> float:
        """The excess of the plan over the best known answer, as a share of that."""
        return max(0.0, self.objective / self.known - 1)

    @property
    def most(self) -> float:
        """The most that the plan may take beyond the optimum, by the proof."""
        return max(0.0, self.objective / self.least - 1) if self.least > 0 else np.inf

    @property
    def violations(self) -> list[str]:
        """The errors in what the plan says of itself, in words with both numbers."""
        problems: list[str] = []
        if self.known < self.bound * (1 - EXACT):
            problems.append(f"an answer takes {self.known:.6g} s, and the printed bound is {self.bound:.6g} s")
        if self.objective < self.least * (1 - EXACT):
            problems.append(f"the plan takes {self.objective:.6g} s, and the proof says at least {self.least:.6g} s")
        if not -SHARED < self.step_seconds / self.objective - 1 <= EXACT:
            problems.append(f"the plan's parts take {self.step_seconds:.6g} s, its solution {self.objective:.6g} s")
        if self.status == "optimal" and self.gap > (1 + EXACT) * SolverOptions().gap:
            problems.append(
                f"called optimal with a gap of {100 * self.gap:.2g} %, {100 * SolverOptions().gap:.2g} at most"
            )
        return problems


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimality",
        description="Plan random networks (benchmarks.networks) by default, and solve the same problems untied, or by "
        "trying every answer where there are few. Prints how much more than the optimum each plan takes, the gap that "
        "it prints and the seconds that it took. Exits with 1 if a network crashes the planner, or if an answer is "
        "below the bound that a plan prints.",
        epilog="example: python -m benchmarks.optimality --seed 3 --first 17 --count 1 --clusters 8:a100-80g",
    )
    add_arguments(parser, COUNT, CLUSTERS)
    parser.add_argument(
        "--proof",
        default="untied",
        metavar="WAY",
        help="untied: solve without merging equal nodes; a solver of PuLP, such as highs or cbc: solve also whole what "
        "stays open then; none: only plan (default: %(default)s)",
    )
    parser.add_argument(
        "--proof-seconds",
        default=60.0,
        type=float,
        metavar="S",
        help="that such a solver has for a mesh (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser.parse_args(argv)


def proof_of(design: Design, cluster: str, proof: str = "untied", proof_seconds: float | None = None) -> Held:
    """The plan of one network for a cluster, with the proof."""
    jax.config.update("jax_platforms", "cpu")
    network = design.network()
    step = autopar.parallelize(network.step, cluster=cluster, donate_argnums=(0,))
    written = step.step(network.state, network.batch)
    cpu, wall = time.process_time(), time.perf_counter()
    plan = cast("autopar.Plan", step.plan(network.state, network.batch))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    given = list(problems(plan.step_of(written), parse_cluster(cluster)))
    proof_found = (
        Proof(objective=plan.solution.objective, bound=plan.solution.bound, way="none")
        if proof == "none"
        else proven(given, plan.solution.objective, None if proof == "untied" else proof, proof_seconds)
    )
    largest = max(map(size, given), key=lambda problem_size: problem_size.strategies)
    return Held(
        nodes=largest.nodes,
        strategies=largest.strategies,
        entries=largest.entries,
        status=plan.solution.status,
        step_seconds=plan.step_seconds,
        objective=plan.solution.objective,
        bound=plan.solution.bound,
        known=min(proof_found.objective, plan.solution.objective),
        least=proof_found.bound,
        way=proof_found.way,
        cpu=cpu,
        wall=wall,
    )


def measured(
    cases: Sequence[Case], args: argparse.Namespace, announce: Callable[[str], None]
) -> tuple[dict[Case, Held], dict[Case, str]]:
    """The cases that were planned and proven, and the reasons why the others crashed."""
    results: dict[Case, Held] = {}
    crashed: dict[Case, str] = {}
    began = time.perf_counter()
    with Child() as child:
        for done, case in enumerate(cases):
            wrong = sum(bool(result.violations) for result in results.values())
            announce(
                f"{done} of {len(cases)}, {time.perf_counter() - began:.0f} s, "
                f"{quantities.count(len(crashed), 'crash', 'crashes')}, {wrong} wrong: {case}"
            )
            given = drawn(case.seed, case.number), case.cluster, args.proof, args.proof_seconds
            try:
                results[case] = child.call(proof_of, *given, seconds=SECONDS)
            except CrashError as error:
                crashed[case] = str(error)
    return results, crashed


def summary(results: Sequence[Held], crashes: int) -> dict[str, float]:
    """Numbers of networks, crashes and violations, and percentiles of gaps, excesses and seconds, by name."""
    summed: dict[str, float] = {
        "networks": len(results) + crashes,
        "crashes": crashes,
        "violations": sum(bool(result.violations) for result in results),
    }
    for name in ("gap", "excess", "most", "cpu", "wall"):
        values = [getattr(result, name) for result in results] or [np.nan]
        for what, share in (("median", 50), ("95 %", 95), ("worst", 100)):
            summed[f"{name}, {what}"] = float(np.percentile(values, share))
    return summed


def table(results: dict[Case, Held], crashed: dict[Case, str]) -> Table:
    """A network a row; what is wrong in red, what misses the targets in yellow."""
    rows = Table(title="plans and proofs", title_justify="left", padding=(0, 0))
    rows.add_column("network", min_width=40)
    for name in (
        "nodes",
        "strategies",
        "entries",
        "crash",
        "step",
        "excess",
        "proven",
        "gap",
        "bounds hold",
        "CPU",
        "wall",
    ):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("status")
    rows.add_column("proof")
    for case, result in results.items():
        rows.add_row(
            str(case),
            str(result.nodes),
            str(result.strategies),
            f"{result.entries:.0e}",
            "",
            quantities.seconds(result.objective),
            *(f"{100 * share:.2g} %" for share in (result.excess, result.most, result.gap)),
            "no" if result.violations else "yes",
            f"{result.cpu:.1f} s",
            f"{result.wall:.1f} s",
            result.status,
            result.way,
            style="red"
            if result.violations
            else "yellow"
            if result.gap > GAP_BOUND or result.cpu > MOST_SECONDS
            else None,
        )
    for case, why in crashed.items():
        rows.add_row(str(case), "", "", "", "yes", *[""] * 7, why.strip().splitlines()[-1], style="red")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the command line asks for; 1 if anything crashed or a printed bound is wrong."""
    args = arguments(argv)
    progress = Console(stderr=True, highlight=False)
    console = stdout()
    numbers = range(args.first, args.first + args.count)
    cases = [Case(seed=args.seed, number=number, cluster=cluster) for number in numbers for cluster in args.clusters]
    with progress.status("") as status:
        results, crashed = measured(cases, args, status.update if progress.is_terminal else progress.print)
    summed = summary(list(results.values()), len(crashed))
    wrong = bool(crashed) or any(result.violations for result in results.values())
    if args.json:
        print(json_text(_as_json(results, crashed, summed), indent=1))
        return wrong
    console.print(table(results, crashed))
    for case, result in results.items():
        for violation in result.violations:
            console.print(f"WRONG {case}: {violation}", style="red", soft_wrap=True)
    for case, why in crashed.items():
        console.print(f"CRASH {case}: {why}", style="red", soft_wrap=True, markup=False)
    for name, value in summed.items():
        share = name.startswith(("gap", "excess", "most"))
        console.print(f"{name}: {f'{100 * value:.3g} %' if share else f'{value:.3g}'}")
    console.print(
        f"targets: gap {100 * GAP_BOUND:.0f} % in {MEDIAN_SECONDS:.0f} s (median) and {MOST_SECONDS:.0f} s (95 %). "
        "excess: of the plan's step over the best answer known; proven (most): over the optimum at most, by the proof; "
        "entries: of the tables that eliminating the problem's nodes would take"
    )
    return wrong


def _as_json(results: dict[Case, Held], crashed: dict[Case, str], summed: dict[str, float]) -> dict[str, Any]:
    rows = [
        {
            "network": str(case),
            **asdict(case),
            **asdict(result),
            "gap": result.gap,
            "excess": result.excess,
            "most": result.most,
        }
        | {"violations": result.violations}
        for case, result in results.items()
    ]
    crashes = [{"network": str(case), **asdict(case), "why": why} for case, why in crashed.items()]
    return {"held": rows, "crashed": crashes, "summary": summed}


if __name__ == "__main__":
    sys.exit(main())
