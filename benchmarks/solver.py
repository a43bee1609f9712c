"""Answers to instances of the IOPDDL contest by a solver of very large graphs: `python -m benchmarks.solver --help`."""

import argparse
import gzip
import json
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.console import stdout
from benchmarks.iopddl.graph_problem import GraphProblem, Pair, Usage
from benchmarks.iopddl.large import Options, solve
from passes.errors import PlanningError

FORBIDDEN = 10**18
BOUND_RATIO = 1.01

# The best published cost and the contest's time-out in seconds; shared/data/README.md says where they come from.
PUBLISHED = {
    "A": (6_548_641_531, 60.0),
    "G": (217_039, 120.0),
    "M": (49_928_460_991, 180.0),
    "S": (1_534_613_444, 240.0),
}
DEFAULT_SECONDS = 240.0

Instance = dict[str, Any]
"""The `problem` of an instance's JSON: `nodes`, `edges`, `usage_limit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """One instance. Costs are the evaluator's, not the solver's; `best` is the best published cost, if one is known.

    `seconds` counts from opening the file, `cpu` is what this process computed in it; `reading` is the share of the
    file and `nodes_left` those that the reductions leave. `error` says why there is no answer.
    """

    instance: str
    nodes: int
    edges: int
    strategies: int
    nodes_left: int
    rounds: int
    cost: int | None
    bound: float | None
    gap: float | None
    best: int | None
    ratio: float | None
    feasible: bool
    seconds: float
    reading: float
    cpu: float
    limit: float
    error: str = ""

    @property
    def misses(self) -> list[str]:
        """The results out of bounds, in words with both numbers."""
        missed: list[str] = []
        if not self.feasible:
            missed.append(f"{self.instance}: no feasible answer{': ' if self.error else ''}{self.error}")
        if self.ratio is not None and self.ratio > BOUND_RATIO:
            missed.append(f"{self.instance}: {self.ratio:.4f} of the best published cost, bound {BOUND_RATIO}")
        if self.seconds > self.limit:
            missed.append(f"{self.instance}: {self.seconds:.1f} s ({self.cpu:.1f} s of CPU), limit {self.limit:.0f} s")
        return missed


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.solver",
        description="Solve instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl) "
        "and print cost, lower bound, gap, and whether an evaluator of its own finds every answer feasible. Exits with "
        f"1 if an answer is not feasible, is late, or costs more than {BOUND_RATIO} times the best published cost.",
        epilog="example: python -m benchmarks.solver --data ../shared/data/iopddl --instances A,G --json",
    )
    parser.add_argument(
        "--data", required=True, type=Path, metavar="DIR", help="where instances lie as NAME.json or NAME.json.gz"
    )
    parser.add_argument(
        "--instances", metavar="NAME,NAME", help="which to solve (default: every instance in the folder)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="wall clock for each instance, reading included (default: the contest's time-out where it is known: "
        f"{', '.join(f'{name} {limit:.0f}' for name, (_, limit) in PUBLISHED.items())}; else {DEFAULT_SECONDS:.0f})",
    )
    parser.add_argument("--gap", default=Options().gap, type=float, help="end early at this gap (default: %(default)s)")
    parser.add_argument("--seed", default=0, type=int, help="of what is random in the search (default: %(default)s)")
    parser.add_argument(
        "--workers", default=2, type=int, choices=(1, 2), help="processes for large instances (default: %(default)s)"
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write every answer there, as NAME.json: one strategy per node"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(argv)


def instances(folder: Path, names: str | None) -> list[tuple[str, Path]]:
    """Short names and files of the instances asked for; the contest's long names work too."""
    files = {
        path.name.removesuffix(".gz").removesuffix(".json"): path
        for pattern in ("*.json", "*.json.gz")
        for path in sorted(folder.glob(pattern))
    }
    if not files:
        raise SystemExit(f"--data {folder}: no file NAME.json or NAME.json.gz there")
    short = {name.rpartition("-")[2]: path for name, path in files.items()}
    available = files | {name: path for name, path in short.items() if name not in files}
    requested = sorted(files) if names is None else [name.strip() for name in names.split(",")]
    for name in requested:
        if name not in available:
            raise SystemExit(f"--instances {name}: not in {folder}, which has {', '.join(sorted(files))}")
    return [(name.rpartition("-")[2], available[name]) for name in requested]


def read(path: Path) -> Instance:
    """The instance in a file."""
    text = path.read_bytes()
    content = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    return content.get("problem", content)


def graph_problem(instance: Instance) -> GraphProblem:
    """The instance as the solver takes it."""
    nodes, edges = instance["nodes"], instance["edges"]
    costs = tuple(numbers(costs_of_node) for costs_of_node in nodes["costs"])
    pairs = tuple(
        Pair(source=u, target=v, costs=numbers(between).reshape(costs[u].size, costs[v].size))
        for (u, v), between in zip(edges["nodes"], edges["costs"], strict=True)
    )
    usages = tuple(
        Usage(node=node, start=interval[0], end=interval[1], nbytes=np.array(nbytes, dtype=np.float64))
        for node, (interval, nbytes) in enumerate(zip(nodes["intervals"], nodes["usages"], strict=True))
        if live(interval)
    )
    limit = instance.get("usage_limit")
    times = max((usage.end for usage in usages), default=0)
    limits = np.full(times, np.inf if limit is None else float(limit))
    return GraphProblem(costs=costs, edges=pairs, usages=usages, limits=limits)


def numbers(costs: list[int]) -> np.ndarray:
    """Costs as floats, infinite where they forbid."""
    return np.array([np.inf if cost >= FORBIDDEN else cost for cost in costs], dtype=np.float64)


def live(interval: list[int]) -> bool:
    """Whether a half-open interval of time holds anything."""
    return len(interval) == 2 and interval[0] < interval[1]


def evaluate(instance: Instance, choice: tuple[int, ...]) -> tuple[int, str]:
    """Cost of an answer, and what is wrong with it, if anything: from the format alone, in whole numbers."""
    nodes, edges = instance["nodes"], instance["edges"]
    if len(choice) != len(nodes["costs"]):
        return 0, f"{len(choice)} strategies for {len(nodes['costs'])} nodes"
    for node, (costs, chosen) in enumerate(zip(nodes["costs"], choice, strict=True)):
        if not 0 <= chosen < len(costs):
            return 0, f"node {node} takes strategy {chosen} of {len(costs)}"
    paid = [costs[chosen] for costs, chosen in zip(nodes["costs"], choice, strict=True)]
    for (u, v), costs in zip(edges["nodes"], edges["costs"], strict=True):
        paid.append(costs[choice[u] * len(nodes["costs"][v]) + choice[v]])
    if max(paid, default=0) >= FORBIDDEN:
        return sum(paid), "a forbidden strategy or pair is chosen"
    change: dict[int, int] = {}
    for interval, usages, chosen in zip(nodes["intervals"], nodes["usages"], choice, strict=True):
        if live(interval):
            change[interval[0]] = change.get(interval[0], 0) + usages[chosen]
            change[interval[1]] = change.get(interval[1], 0) - usages[chosen]
    limit, used = instance.get("usage_limit"), 0
    for moment in sorted(change):
        used += change[moment]
        if limit is not None and used > limit:
            return sum(paid), f"{used} in use at time {moment}, limit {limit}"
    return sum(paid), ""


def measure(name: str, path: Path, args: argparse.Namespace) -> Solved:
    """One instance read, solved and evaluated."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    best, limit = PUBLISHED.get(name, (None, DEFAULT_SECONDS))
    limit = args.seconds or limit
    instance = read(path)
    problem = graph_problem(instance)
    reading = time.perf_counter() - start
    cost = bound = gap = ratio = None
    nodes_left = rounds = 0
    error = ""
    seconds = 0.0
    try:
        margin = 0.02 * limit
        options = Options(seconds=limit - margin - reading, gap=args.gap, seed=args.seed, workers=args.workers)
        answer = solve(problem, options)
        seconds = time.perf_counter() - start
        cost, error = evaluate(instance, answer.choice)
        bound, nodes_left, rounds = answer.bound, answer.nodes_left, answer.rounds
        gap = (cost - bound) / cost if cost else 0.0
        ratio = cost / best if best else None
        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            (args.save / f"{name}.json").write_text(json.dumps(answer.choice))
    except PlanningError as failure:
        seconds, error = time.perf_counter() - start, str(failure)
    return Solved(
        instance=name,
        nodes=len(problem.costs),
        edges=len(problem.edges),
        strategies=sum(costs.size for costs in problem.costs),
        nodes_left=nodes_left,
        rounds=rounds,
        cost=cost,
        bound=bound,
        gap=gap,
        best=best,
        ratio=ratio,
        feasible=cost is not None and not error,
        seconds=seconds,
        reading=reading,
        cpu=cpu_seconds() - cpu_start,
        limit=limit,
        error=error,
    )


def cpu_seconds() -> float:
    """The CPU seconds of this process and of those it has waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def table(results: list[Solved]) -> Table:
    """A row for every instance."""
    names = ["nodes", "after reductions", "cost", "bound", "gap", "/ best published", "feasible", "time", "CPU"]
    shown = Table("instance", *names)
    for column in shown.columns[1:]:
        column.justify = "right"
    for r in results:
        shown.add_row(
            r.instance,
            f"{r.nodes:,}",
            f"{r.nodes_left:,}",
            "-" if r.cost is None else f"{r.cost:,}",
            "-" if r.bound is None else f"{r.bound:,.0f}",
            "-" if r.gap is None else f"{100 * r.gap:.3f} %",
            "-" if r.ratio is None else f"{r.ratio:.5f}",
            "yes" if r.feasible else "NO",
            f"{r.seconds:.1f} s",
            f"{r.cpu:.1f} s",
        )
    return shown


def main(argv: list[str] | None = None) -> int:
    """Prints what the command line asks for; 1 if a bound is missed."""
    args = arguments(argv)
    console = stdout()
    results: list[Solved] = []
    for name, path in instances(args.data, args.instances):
        with console.status(f"solving {name}"):
            results.append(measure(name, path, args))
    misses = [miss for result in results for miss in result.misses]
    if args.json:
        print(json.dumps({"results": [asdict(r) for r in results], "misses": misses}, indent=1))
        return bool(misses)
    console.print(table(results))
    for miss in misses:
        console.print(f"MISSED {miss}", style="red", soft_wrap=True)
    return bool(misses)


if __name__ == "__main__":
    raise SystemExit(main())
