"""The training of a small model on real data as autopar plans it: shared by `benchmarks.moe` and `.wide_resnet`."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import jax
from rich.table import Table

import autopar
from autopar.tools.command import kept_plans
from benchmarks.console import stdout
from benchmarks.gpt import EDGE_STEPS, make_optimizer, progress, start_devices
from benchmarks.gpt_options import NUMBER, PIPELINES, add_pipeline, add_saved_plan, make_pipeline
from benchmarks.trainings import make_state, make_step

Batches = Callable[[int, int], Iterator[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A module of `models` with a configuration, its data, and what is reported of its training.

    `batches(batch size, seed)` yields batches without end. In the rates that are printed, each sample counts as
    `units_a_sample` of `unit`, which is tokens or images. `judge(state)` is a line of the result: its label, and the
    trained state's quality on held-out data. In a `coupled` model the samples of a batch depend on each other, as by
    batch normalisation: microbatches then take their own statistics, and the step is not exactly that of the batch.
    """

    module: ModuleType
    config: Any
    batches: Batches
    unit: str
    units_a_sample: int
    judge: Callable[[Any], tuple[str, str]]
    coupled: bool = False


def parser(name: str, description: str, *, batch: int, learning_rate: float) -> argparse.ArgumentParser:
    """The command line of the script called `name`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=f"example: python -m benchmarks.{name} --planner zero3 --steps 50",
    )
    parser.add_argument("--steps", default=100, **NUMBER, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", default=batch, **NUMBER, help="samples a step, all devices (default: %(default)s)")
    parser.add_argument(
        "--learning-rate",
        default=learning_rate,
        type=float,
        metavar="X",
        help="of AdamW, constant (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", default=0, type=int, metavar="N", help="of parameters and batches (default: %(default)s)"
    )
    parser.add_argument(
        "--planner",
        default="auto",
        type=planner,
        metavar="auto|dp|zero3|megatron:DxT|gpipe|1f1b",
        help="autopar's search (auto), or a hand-made plan; megatron cuts the batch over D devices, matrices over T; "
        "gpipe and 1f1b make a pipeline (default: %(default)s)",
    )
    add_pipeline(parser)
    parser.add_argument(
        "--devices", **NUMBER, help="virtual devices to make on a CPU (default: 8); others are all used"
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="plan for the cluster that `autopar measure --out FILE` saved (default: the devices here)",
    )
    add_saved_plan(parser)
    return parser


def options(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The parsed command line, with a pipeline as its planner where one is named; exits where options contradict."""
    args = parser.parse_args(argv)
    schedule = args.planner if args.planner in PIPELINES else None
    try:
        pipeline = make_pipeline(schedule, args.stages, args.microbatches, args.batch)
    except ValueError as error:
        parser.error(str(error))
    args.planner = pipeline or args.planner
    args.microbatches = pipeline.microbatches if pipeline else args.microbatches or 1
    return args


def planner(text: str) -> Any:
    """The planner that `text` names, or the name of a pipeline, which `options` completes.

    Raises ArgumentTypeError for any other text.
    """
    match text.partition(":"):
        case "auto", "", _:
            return autopar.Auto()
        case "dp", "", _:
            return autopar.DataParallel()
        case "zero3", "", _:
            return autopar.Zero(3)
        case name, "", _ if name in PIPELINES:
            return name
        case "megatron", ":", sizes:
            parts = sizes.split("x")
            if len(parts) == 2 and all(part.isdecimal() for part in parts):
                return autopar.Megatron(data=int(parts[0]), tensor=int(parts[1]))
    raise argparse.ArgumentTypeError(
        f"{text!r} is no planner: give auto, dp, zero3, gpipe, 1f1b or, for 2 x 4 devices, megatron:2x4"
    )


def run(task: Task, args: argparse.Namespace) -> None:
    """Plans, trains and prints as the command line says. Raises SystemExit if that planner has no plan."""
    console = stdout()
    devices = start_devices(args.devices, "auto")
    optimizer = make_optimizer("adamw", args.learning_rate)
    step = autopar.parallelize(
        make_step(task.module, task.config, optimizer),
        cluster=args.cluster,
        planner=args.planner,
        donate_argnums=(0,),
        microbatches=args.microbatches,
        microbatch_semantics="independent" if task.coupled else "exact",
        cache=None if args.no_cache else kept_plans(),
    )
    state = jax.jit(partial(make_state, task.module, task.config, optimizer))(jax.random.key(args.seed))
    batches = task.batches(args.batch, args.seed)
    console.print(
        f"{task.module.parameters(task.config):,} parameters; {args.batch * task.units_a_sample:,} {task.unit} a step; "
        f"{devices} x {jax.devices()[0].device_kind}",
        soft_wrap=True,
    )
    if task.coupled and args.microbatches > 1:
        console.print(
            'microbatch_semantics="independent": batch normalisation takes each microbatch\'s own statistics, so the '
            "step differs from that of the whole batch",
            soft_wrap=True,
        )
    start = time.perf_counter()
    try:
        plan = step.plan(state, next(task.batches(args.batch, args.seed)))
    except autopar.PlanningError as error:  # as for a Megatron of too many devices
        raise SystemExit(str(error)) from error
    console.print(plan.format(width=min(console.width, 120)), markup=False, soft_wrap=True)
    plan.save(args.out)
    console.print(f"planned in {time.perf_counter() - start:.1f} s, saved to {args.out}", soft_wrap=True)

    losses: list[float] = []
    seconds: list[float] = []
    with progress(console, args.steps, task.unit) as show:
        for batch in islice(batches, args.steps):
            start = time.perf_counter()
            state, loss = step(state, batch)
            losses.append(float(loss))  # waits for the step, so that the time is the step's own
            seconds.append(time.perf_counter() - start)
            show(losses[-1], args.batch * task.units_a_sample / seconds[-1])
    console.print(result_table(task, args.batch, losses, seconds, jax.device_get(state)))


def result_table(task: Task, batch_size: int, losses: list[float], seconds: list[float], state: Any) -> Table:
    """The losses, step times and speed of a run, and the trained state's quality, as a table."""
    table = Table(title="result", show_header=False, title_justify="left")
    step = statistics.median(seconds[1:] or seconds)
    table.add_row(
        "first loss", f"{statistics.fmean(losses[:EDGE_STEPS]):.3f} nats, mean of {len(losses[:EDGE_STEPS])} steps"
    )
    table.add_row("last loss", f"{statistics.fmean(losses[-EDGE_STEPS:]):.3f}")
    table.add_row(*task.judge(state))
    table.add_row("step", f"{step * 1e3:,.1f} ms, median after the first")
    table.add_row("first step", f"{seconds[0]:.1f} s, with compilation")
    rate = task.module.flops(task.config, batch_size) / step
    table.add_row("speed", f"{batch_size * task.units_a_sample / step:,.0f} {task.unit}/s, {rate / 1e9:,.1f} GFLOP/s")
    return table
