"""Step times of every model under autopar's plan and hand-made ones, on 8 CPU devices: `python -m benchmarks.zoo
--help`.

The devices are measured first, so that plans are chosen for them: virtual CPUs that share cores and a slow transport.
Equality with `jax.jit` and the absence of unplanned collectives are bounds; step times are targets.
"""

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.checks import hlo, verify
from benchmarks.baselines import baselines, sharded
from benchmarks.console import progress_of_tasks, stdout
from benchmarks.equality import difference, mesh_text
from benchmarks.lists import names, some_of
from benchmarks.one_device import Runner
from benchmarks.timing import TURN, WARM_UP, interleaved, ratio
from benchmarks.trainings import MODELS, QUICK, Training
from passes.text import quantities

DEVICES = 8
STEPS = 3
BOUND = 1e-10  # relative difference from jax.jit in float64
TARGET = 1.0  # the largest ratio of autopar's step time to the best baseline's
EXECUTION_TARGET = 1.02  # the largest ratio to that of plain jax.jit under the same input and output shardings

AUTOPAR, COMPARED = "autopar", "compared"

EXECUTIONS: dict[str, tuple[str, Any]] = {
    "dp": ("gpt", autopar.DataParallel()),
    "zero3": ("gpt", autopar.Zero(3)),
    "megatron 2x4": ("gpt", autopar.Megatron(data=2, tensor=4)),
    "auto": ("moe", autopar.Auto()),  # which sends tokens to experts cut over the devices, by all-to-alls
}
"""Name -> model and planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A planned float64 program's largest relative difference from `jax.jit` over its steps, and its collectives.

    `collectives` are numbers of tensors that the plan sends a step, by kind; `unplanned` those compiled beyond them.
    """

    mesh: str
    difference: float
    collectives: dict[str, int]
    planned_nbytes: int
    compiled_nbytes: int
    unplanned: int

    @property
    def misses(self) -> list[str]:
        """The results out of bounds, in words with both numbers."""
        misses = []
        if not self.difference <= BOUND:
            misses.append(f"differs from jax.jit by {self.difference:.1e}, bound {BOUND:.0e}")
        if self.unplanned:
            misses.append(f"{self.unplanned} unplanned collectives, bound 0")
        if self.planned_nbytes != self.compiled_nbytes:
            misses.append(f"{self.planned_nbytes:,} bytes planned, {self.compiled_nbytes:,} compiled")
        return misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plan that `Auto` found for a model in float32, and the seconds of its steps and of the baselines', by name.

    `comparison` is the text of `autopar.compare`, empty where it was not run.
    """

    model: str
    mesh: str
    collectives: dict[str, int]
    planning_seconds: float
    predicted_seconds: float
    seconds: dict[str, tuple[float, ...]]
    checked: Checked
    comparison: str = ""

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(seconds) for name, seconds in self.seconds.items()}

    @property
    def best(self) -> str:
        """The baseline of the least median."""
        medians = self.medians
        return min(medians.keys() - {AUTOPAR, COMPARED}, key=medians.__getitem__)

    @property
    def ratio(self) -> tuple[float, tuple[float, float]]:
        """The ratio of the plan's step time to the best baseline's, and its 95 % interval."""
        return ratio(self.seconds, AUTOPAR, self.best)

    @property
    def compared_ratio(self) -> tuple[float, tuple[float, float]] | None:
        """The same ratio of the plan that `autopar.compare` chose, None where it was not run."""
        return ratio(self.seconds, COMPARED, self.best) if COMPARED in self.seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Seconds of steps of one plan as autopar's program and as plain `jax.jit`'s under the plan's own shardings."""

    plan: str
    model: str
    mesh: str
    seconds: dict[str, tuple[float, ...]]

    @property
    def ratio(self) -> tuple[float, tuple[float, float]]:
        """The ratio of autopar's step time to jit's, and its 95 % interval."""
        return ratio(self.seconds, AUTOPAR, "jit")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo",
        description=f"Plan every model for {DEVICES} virtual CPU devices as they are measured here, and run each plan "
        "in turn with data parallelism, FSDP, Megatron, expert parallelism and cut tables as plain jax.jit runs them "
        f"under hand-written shardings. Exits with 1 if {STEPS} steps in float64 differ from jax.jit by more than "
        f"{BOUND:.0e}, or if a plan and its program send different things; slow plans are only named.",
        epilog="example: python -m benchmarks.zoo --models gpt,moe --cluster here.json",
    )
    parser.add_argument(
        "--models",
        default=tuple(MODELS),
        type=names("model", MODELS),
        metavar="A,B",
        help=some_of(MODELS),
    )
    parser.add_argument(
        "--rounds", "--pairs", default=20, type=int, metavar="N", help="of steps (default: %(default)s)"
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="what `autopar measure --devices 8 --out FILE` saved (default: measure now)"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--executions",
        action="store_true",
        help="instead, run plans by autopar's program and by plain jax.jit under the plan's own input and output "
        "shardings",
    )
    either.add_argument(
        "--compare",
        action="store_true",
        help="also run the plan that autopar.compare chooses, which times steps of searched and of hand-made plans",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser.parse_args(argv)


def by_kind(plan: Any) -> dict[str, int]:
    """The number of tensors that a plan sends a step by each kind of collective, the most frequent kind first."""
    counts: Counter[str] = Counter()
    for collective in plan.collectives:
        counts[collective.kind] += collective.count
    return dict(counts.most_common())


def check(training: Training, cluster: Any, planner: Any = None, steps: int = STEPS) -> Checked:
    """A training in float64, planned and compared with `jax.jit`, and its collectives with its plan's."""
    lowered = autopar.parallelize(training.step, cluster=cluster, planner=planner).lower(training.state, training.batch)
    compiled = lowered.compile({**hlo.UNCOMBINED, **QUICK})
    verification = verify(lowered.plan, compiled.as_text())
    plain = jax.jit(training.step, compiler_options=QUICK)
    ours = theirs = training.state
    worst = 0.0
    for _ in range(steps):
        ours, loss = compiled(ours, training.batch)
        theirs, expected = plain(theirs, training.batch)
        pair = jax.tree.map(np.asarray, ((ours, loss), (theirs, expected)))
        finite = all(np.isfinite(x).all() for x in jax.tree.leaves(pair))
        worst = max(worst, difference(*pair) if finite else np.inf)
    return Checked(
        mesh=mesh_text(lowered.plan),
        difference=worst,
        collectives=by_kind(lowered.plan),
        planned_nbytes=sum(row.planned_nbytes for row in verification.rows),
        compiled_nbytes=sum(row.compiled_nbytes for row in verification.rows),
        unplanned=sum(collective.count for collective in verification.unplanned),
    )


def planned(training: Training, cluster: Any, planner: Any = None) -> Any:
    """The training's step compiled as planned, its state donated."""
    step = autopar.parallelize(training.step, cluster=cluster, planner=planner, donate_argnums=(0,))
    return step.lower(training.state, training.batch).compile()


def placed(compiled: Any, training: Training) -> Runner:
    """A compiled step and its arguments, laid out as its plan has them."""
    return Runner(compiled, *jax.device_put((training.state, training.batch), compiled.input_shardings[0]))


def find(model: str, cluster: Any, rounds: int, report: Callable[[str], None], *, compare: bool = False) -> Found:
    """One model's plan, checked and timed beside its baselines and, with `compare`, beside `autopar.compare`'s plan."""
    report("planning")
    training = MODELS[model].training()
    start = time.perf_counter()
    plan = autopar.parallelize(training.step, cluster=cluster).plan(training.state, training.batch)
    planning_seconds = time.perf_counter() - start
    report("compiling")
    runners = {AUTOPAR: placed(planned(training, cluster, autopar.Manual(plan)), training)}
    for name, baseline in baselines(model, DEVICES):
        runners[name] = baseline.runner(training)
        runners[name].seconds()
        report(f"compiling {name}")
    comparison = ""
    if compare:
        report("comparing plans")
        start = time.perf_counter()
        step = autopar.parallelize(training.step, cluster=cluster, planner=autopar.Manual(plan), donate_argnums=(0,))
        compared = autopar.compare(step, (training.state, training.batch))
        comparison = f"{model}, compared in {time.perf_counter() - start:.0f} s: {compared}"
        runners[COMPARED] = placed(planned(training, cluster, autopar.Manual(compared.plan)), training)
        runners[COMPARED].seconds()
    seconds = interleaved(runners, rounds, tick=lambda: report("running"))
    del runners
    report("comparing")
    with jax.enable_x64(True):
        checked = check(MODELS[model].training("float64"), cluster)
    return Found(
        model=model,
        mesh=mesh_text(plan),
        collectives=by_kind(plan),
        planning_seconds=planning_seconds,
        predicted_seconds=plan.step_seconds,
        seconds=seconds,
        checked=checked,
        comparison=comparison,
    )


def execute(name: str, cluster: Any, rounds: int, report: Callable[[str], None]) -> Execution:
    """The plan called `name` run as autopar's program and by plain `jax.jit`, timed in turn."""
    model, planner = EXECUTIONS[name]
    training = MODELS[model].training()
    report("planning and compiling")
    compiled = planned(training, cluster, planner)
    plain = sharded(training, compiled.input_shardings[0], compiled.output_shardings)
    runners = {AUTOPAR: placed(compiled, training), "jit": plain}
    seconds = interleaved(runners, rounds, tick=lambda: report("running"))
    return Execution(plan=name, model=model, mesh=mesh_text(compiled.plan), seconds=seconds)


def kinds(collectives: dict[str, int]) -> str:
    """`all_reduce 12, permute 3`."""
    return ", ".join(f"{kind} {count}" for kind, count in collectives.items()) or "none"


def plans_table(results: list[Found]) -> Table:
    """The plans found and what was checked of them, one model a row; what is out of bounds in red."""
    table = Table(title="plans found for the measured devices", title_justify="left", padding=(0, 0))
    for name in ("model", "mesh", "tensors a step, by kind"):
        table.add_column(name, overflow="fold")
    for name in ("planning", "differs", "unplanned", "bytes planned", "compiled"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.model,
            r.mesh,
            kinds(r.collectives),
            f"{r.planning_seconds:.1f} s",
            f"{r.checked.difference:.0e}",
            str(r.checked.unplanned),
            quantities.nbytes(r.checked.planned_nbytes),
            quantities.nbytes(r.checked.compiled_nbytes),
            style="red" if r.checked.misses else None,
        )
    return table


def times_table(results: list[Found]) -> Table:
    """Median milliseconds of a step, one model a row."""
    runs = list(dict.fromkeys(name for r in results for name in r.seconds))
    table = Table(title="median step, ms", title_justify="left", padding=(0, 0))
    table.add_column("model", no_wrap=True)
    is_compared = any(r.compared_ratio for r in results)
    compared = ["compared / best", "95 %"] if is_compared else []
    for name in ("predicted", *runs, "autopar / best", "95 %", *compared):
        table.add_column(name, justify="right")
    for r in results:
        medians = {name: f"{seconds * 1e3:.3g}" for name, seconds in r.medians.items()}
        ratios = (r.ratio, *([r.compared_ratio] if r.compared_ratio else []))
        medians[r.best] = f"[bold]{medians[r.best]}[/]"
        table.add_row(
            r.model,
            f"{r.predicted_seconds * 1e3:.3g}",
            *(medians.get(name, "") for name in runs),
            *(text for middle, (low, high) in ratios for text in (f"{middle:.2f}", f"{low:.2f}-{high:.2f}")),
        )
    return table


def executions_table(results: list[Execution]) -> Table:
    """Both executions of each plan, one plan a row."""
    table = Table(title="the same plan, two executions: median step, ms", title_justify="left", padding=(0, 0))
    for name in ("plan", "model", "mesh"):
        table.add_column(name, no_wrap=True)
    for name in (AUTOPAR, "jax.jit", "ratio", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        middle, (low, high) = r.ratio
        medians = (f"{statistics.median(r.seconds[name]) * 1e3:.3g}" for name in (AUTOPAR, "jit"))
        table.add_row(r.plan, r.model, r.mesh, *medians, f"{middle:.3f}", f"{low:.3f}-{high:.3f}")
    return table


def missed(results: list[Found] | list[Execution]) -> list[str]:
    """The step times above their targets, in words with both numbers."""
    misses = []
    for r in results:
        middle, (low, high) = r.ratio
        name, than, target = (
            (r.model, r.best, TARGET)
            if isinstance(r, Found)
            else (r.plan, "the same plan by jax.jit", EXECUTION_TARGET)
        )
        if middle > target:
            misses.append(f"{name}: {middle:.3f} times {than} (95 % {low:.3f} to {high:.3f}), target {target}")
    return misses


def main(argv: list[str] | None = None) -> int:
    """Prints the tables that the command line asks for; 1 if anything is out of bounds."""
    args = arguments(argv)
    console, progress_console = stdout(), Console(stderr=True, highlight=False)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    results: list[Any] = []
    with progress_of_tasks(progress_console, 1 + len(EXECUTIONS if args.executions else args.models)) as begin:
        cluster = args.cluster or autopar.measure(announce=begin("measuring"))
        if args.executions:
            results += [execute(name, cluster, args.rounds, begin(name)) for name in EXECUTIONS]
        else:
            results += [find(name, cluster, args.rounds, begin(name), compare=args.compare) for name in args.models]
    faults = [] if args.executions else [f"{r.model}: {miss}" for r in results for miss in r.checked.misses]
    slow = missed(results)
    if args.json:
        rows = [asdict(r) | {"ratio": r.ratio} for r in results]
        print(json.dumps({"results": rows, "misses": faults, "slow": slow, "load": os.getloadavg()}, indent=1))
        return bool(faults)
    for table in (executions_table,) if args.executions else (plans_table, times_table):
        console.print(table(results))
    if args.compare:
        console.print(*(result.comparison for result in results), sep="\n\n", end="\n\n", soft_wrap=True)
    console.print(
        f"{args.rounds} rounds after {WARM_UP} of warm-up, in each of which every program takes {TURN} steps and the "
        "last is timed; float32, SGD with momentum; ratios are medians over rounds with 95 % bootstrap intervals. "
        f"{DEVICES} virtual devices share {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}."
    )
    if not args.executions:
        console.print(
            f"differs: largest relative difference from jax.jit in {STEPS} steps in float64, bound {BOUND:.0e}; "
            "unplanned collectives, bytes planned and compiled are of that float64 program"
        )
    for misses, style in ((slow, "yellow"), (faults, "red")):
        for miss in misses:
            console.print(f"MISSED {miss}", style=style, soft_wrap=True)
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
