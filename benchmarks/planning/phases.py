"""Seconds of the phases of planning a GPT, and figures of the plan: `python -m benchmarks.planning --help`."""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, cast

import jax
from rich.table import Table

import autopar
from benchmarks.console import stdout
from benchmarks.planning import full_search, one_mesh
from models import gpt
from passes.cluster import Cluster, parse_cluster
from passes.errors import PlanningError
from passes.solver import SolverOptions
from passes.text import quantities

BOUND_SECONDS = 30.0
BOUND_MODEL, BOUND_DEVICES = "350M", 8

PLANNERS: dict[str, Callable[..., Any]] = {
    "auto": autopar.Auto,
    "dp": autopar.DataParallel,
    "zero2": lambda **options: autopar.Zero(2, **options),
    "zero3": lambda **options: autopar.Zero(3, **options),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One plan's figures, and the seconds that each phase of planning took.

    `total` is all that passed, `cpu` what this process computed in it: far less if others kept the machine busy.
    `sizes` counts what planning had to handle, as far as the plan says.
    """

    model: str
    cluster: str
    planner: str
    phases: dict[str, float]
    total: float
    cpu: float
    sizes: dict[str, int]
    mesh: str
    status: str
    gap: float
    objective: float
    step_seconds: float
    peak_nbytes: int
    rss_nbytes: int

    @property
    def misses(self) -> list[str]:
        """The results out of bounds, in words with both numbers."""
        if self.model != BOUND_MODEL or self.sizes["devices"] != BOUND_DEVICES or self.total <= BOUND_SECONDS:
            return []
        took = f"{self.total:.1f} s ({self.cpu:.1f} s of CPU)"
        return [f"{self.model} on {self.cluster} with {self.planner}: {took}, bound {BOUND_SECONDS:.0f} s"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning",
        description="Plan GPTs for a cluster that need not be here, and print how long each phase took and the plan's "
        f"figures. Exits with 1 if {BOUND_MODEL} on {BOUND_DEVICES} devices takes more than "
        f"{BOUND_SECONDS:.0f} s in all, tracing included.",
        epilog="example: python -m benchmarks.planning --model 125M --model 350M --cluster 2x8:a100-80g; "
        "two tables have options of their own: cases --help, growth --help",
    )
    parser.add_argument(
        "--model",
        choices=(*gpt.PRESETS, *one_mesh.MODELS),
        action="append",
        help=f"give it again for more (default: {BOUND_MODEL})",
    )
    parser.add_argument(
        "--cluster",
        default="1x8:a100-80g",
        type=cluster,
        metavar="HOSTSxDEVICES:KIND",
        help="what to plan for, or a JSON file (default: %(default)s)",
    )
    parser.add_argument("--batch", default=16, type=int, metavar="N", help="sequences a step (default: %(default)s)")
    parser.add_argument("--planner", default="auto", choices=tuple(PLANNERS), help="(default: %(default)s)")
    parser.add_argument(
        "--time-limit",
        default=SolverOptions().time_limit,
        type=float,
        metavar="SECONDS",
        help="for the solver, for each mesh (default: %(default)s)",
    )
    parser.add_argument(
        "--repeat", default=1, type=int, metavar="N", help="plan N times and print median times (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="this many layers in place of the model's own; lifts the bound"
    )
    parser.add_argument(
        "--mesh",
        type=sizes,
        metavar="ROWSxCOLUMNS",
        help="plan for this one mesh, placements alone, and print CPU and wall time of every phase; then models are "
        f"{', '.join(one_mesh.MODELS)} too",
    )
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="search over stages, submeshes, meshes, microbatches and schedules, and print the time of every phase; "
        "models are those of --mesh",
    )
    parser.add_argument(
        "--tie-check",
        action="store_true",
        help="plan again without merging equal nodes and compare the objectives: exits with 1 if that one is lower by "
        "more than the solver's gap (only for small models: it can take many minutes)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    of_one_mesh = [name for name in args.model or () if name in one_mesh.MODELS]
    if of_one_mesh and not (args.mesh or args.pipeline):
        parser.error(f"--model {of_one_mesh[0]} is planned for one mesh or in stages: add --mesh 8x8 or --pipeline")
    deep = [name for name in args.model or () if name not in (*gpt.PRESETS, *one_mesh.LAYERED)]
    if deep and args.layers:
        parser.error(f"--layers: the depth of {deep[0]} is part of what it is; leave it out, or take another model")
    return args


def sizes(text: str) -> tuple[int, ...]:
    """`8x8` as sizes, its mistakes as argparse reports them."""
    if not re.fullmatch(r"\d+(x\d+){0,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh of one to three axes: write, say, 8x8")
    return tuple(map(int, text.split("x")))


def cluster(text: str) -> Cluster:
    """`text` as a cluster, its mistakes as argparse reports them."""
    try:
        return parse_cluster(text)
    except PlanningError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def plan(name: str, config: gpt.Config, args: argparse.Namespace, options: SolverOptions) -> Planned:
    """The plan of a model's step, timed once."""
    train_step, state = one_mesh.make_step(gpt, config)
    batch = jax.eval_shape(lambda: gpt.example_batch(config, args.batch, jax.random.key(0)))
    planner = PLANNERS[args.planner](solver=options)
    step = autopar.parallelize(train_step, cluster=args.cluster, planner=planner, donate_argnums=(0,))
    start, cpu_start = time.perf_counter(), time.process_time()
    traced = step.trace(state, batch)
    trace_seconds = time.perf_counter() - start
    planned = cast("autopar.Plan", step.plan(state, batch))
    total = time.perf_counter() - start
    solution = planned.solution
    solve_phases = dict(solution.phase_seconds)
    phases = {
        "trace": trace_seconds,
        **solve_phases,
        "rest": max(0.0, total - trace_seconds - sum(solve_phases.values())),
    }
    return Planned(
        model=name,
        cluster=args.cluster.name,
        planner=args.planner,
        phases=phases,
        total=total,
        cpu=time.process_time() - cpu_start,
        sizes={
            "devices": planned.mesh.size,
            "parameters": gpt.parameters(config),
            "operators": len(traced.graph.nodes),
            "inputs": len(planned.inputs),
            "collectives a step": sum(c.count for c in planned.collectives),
            **counted(solution),
        },
        mesh=str(planned.mesh),
        status=solution.status,
        gap=planned.gap,
        objective=solution.objective,
        step_seconds=planned.step_seconds,
        peak_nbytes=planned.peak_nbytes,
        rss_nbytes=one_mesh.rss_nbytes(),
    )


def counted(solution: Any) -> dict[str, int]:
    """Whatever whole numbers a solution has of its own, by name: operator groups, variables, rows, ..."""
    numbers: dict[str, int] = {}
    for field in fields(solution):
        value = getattr(solution, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            numbers[field.name] = value
        elif is_dataclass(value):
            numbers |= counted(value)
    return numbers


def repeated(name: str, config: gpt.Config, args: argparse.Namespace, options: SolverOptions) -> Planned:
    """The plan with the median time of each phase; each repetition traces a new function."""
    runs = [plan(name, config, args, options) for _ in range(args.repeat)]
    phases = {phase: statistics.median(run.phases[phase] for run in runs) for phase in runs[0].phases}
    return replace(
        runs[-1],
        phases=phases,
        total=statistics.median(run.total for run in runs),
        cpu=statistics.median(run.cpu for run in runs),
    )


def tables(planned: Planned) -> list[Table]:
    """Phases and their times; then everything else."""
    times = Table("phase", "time", "share", title=f"GPT {planned.model} on {planned.cluster}", title_justify="left")
    for column in times.columns[1:]:
        column.justify = "right"
    for phase, seconds in planned.phases.items():
        times.add_row(phase, quantities.seconds(seconds), quantities.share(seconds, planned.total))
    times.add_section()
    times.add_row("total", quantities.seconds(planned.total), "")
    times.add_row("CPU of total", quantities.seconds(planned.cpu), quantities.share(planned.cpu, planned.total))
    details = Table(show_header=False)
    details.add_row("planner", planned.planner)
    for name, number in planned.sizes.items():
        details.add_row(name, f"{number:,}")
    details.add_row("mesh", planned.mesh)
    details.add_row("status", f"{planned.status}, gap {100 * planned.gap:.3g} %")
    details.add_row("objective", quantities.seconds(planned.objective))
    details.add_row("predicted step", quantities.seconds(planned.step_seconds))
    details.add_row("predicted peak", f"{quantities.nbytes(planned.peak_nbytes)} a device")
    details.add_row("process peak", f"{quantities.nbytes(planned.rss_nbytes)} of resident memory so far")
    return [times, details]


def compare_ties(tied: Planned, apart: Planned, gap: float) -> list[str]:
    """The line on both objectives, and as second line a miss if tying cost more than the gap."""
    excess = (tied.objective - apart.objective) / apart.objective
    shown = (
        f"{tied.model}: objective with equal nodes tied {tied.objective:.9g} s (in {tied.total:.1f} s), every node "
        f"apart {apart.objective:.9g} s (in {apart.total:.1f} s, {apart.status}); tied is {100 * excess:+.4f} %"
    )
    return [shown] + (
        [f"{tied.model}: tying costs {100 * excess:.4f} %, bound {100 * gap:g} %"] if excess > gap else []
    )


def main(argv: Sequence[str]) -> int:
    """Prints what the command line asks for; 1 if a bound is missed."""
    args = arguments(argv)
    console = stdout()
    jax.config.update("jax_platforms", "cpu")
    tied_options = SolverOptions(time_limit=args.time_limit)
    results: list[Planned] = []
    ties: list[str] = []
    misses: list[str] = []
    if args.mesh:
        for name in args.model or [BOUND_MODEL]:
            phases = one_mesh.plan(name, args.mesh, args.cluster, args.batch, args.layers, tied_options)
            console.print_json(json.dumps(asdict(phases))) if args.json else console.print(*one_mesh.tables(phases))
        return 0
    if args.pipeline:
        for name in args.model or [BOUND_MODEL]:
            searched = full_search.search(name, args.cluster, args.batch, args.layers, tied_options)
            console.print_json(json.dumps(asdict(searched))) if args.json else console.print(
                *full_search.tables(searched)
            )
        return 0
    for name in args.model or [BOUND_MODEL]:
        config = gpt.Config.preset(name)
        if args.layers:
            config, name = replace(config, layers=args.layers), f"{name}, {args.layers} layers"
        with console.status(f"planning {name}"):
            results.append(repeated(name, config, args, tied_options))
            if args.tie_check:
                apart = plan(name, config, args, replace(tied_options, tie_radius=None))
                shown, *missed = compare_ties(results[-1], apart, tied_options.gap)
                ties.append(shown)
                misses += missed
        misses += results[-1].misses
        if not args.json:
            console.print(*tables(results[-1]), sep="\n")
    if args.json:
        print(json.dumps({"results": [asdict(r) for r in results], "ties": ties, "misses": misses}, indent=1))
        return bool(misses)
    for r in results:
        if r.model == BOUND_MODEL and r.sizes["devices"] == BOUND_DEVICES:
            console.print(
                f"{r.model} on {r.cluster}: {r.total:.1f} s in all ({r.cpu:.1f} s of CPU), bound {BOUND_SECONDS:.0f} s"
            )
    for shown in ties:
        console.print(shown)
    for miss in misses:
        console.print(f"MISSED {miss}", style="red", soft_wrap=True)
    return bool(misses)
