"""What pipelines promise and do on virtual CPU devices: `python -m benchmarks.pipeline --help`.

A grid of schedules, stages and microbatches: bubble and step time as predicted and as measured, activations alive.
Then what an instruction costs the host. With `--overlap` instead, how much of what the closed form allows two stages
of one process gain by running at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.runtime import build, runtime
from autopar.runtime.program import Free, Program, Run, Send
from benchmarks.one_device import Pairs
from benchmarks.trainings import MODELS, Training
from passes.inter_op import in_flight
from passes.plan import PipelinePlan
from passes.text import quantities
from passes.transforms import stages

DEVICES = 8
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble-h1")
SHARE = 0.95
"""Of the speed-up that the closed form allows."""

YARDSTICK_NBYTES = 4096

BOUNDS = {(1, 1, 1, 1): (60e-6, 120e-6), (4, 2, 2): (220e-6, 330e-6)}
"""Seconds of the host for one Run and one Send, by the devices of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A planned pipeline ready to run, and the flat arguments of a step, all but the batch where they are read."""

    plan: PipelinePlan
    pipeline: runtime.Pipeline
    leaves: list[Any]

    @property
    def program(self) -> Program:
        return self.pipeline.program

    def seconds(self) -> float:
        """Seconds of a step, to its last result."""
        start = time.perf_counter()
        jax.block_until_ready(self.pipeline(self.leaves))
        return time.perf_counter() - start

    def serial_seconds(self) -> float:
        """Seconds of all that the stages compute in a step, one after the other."""
        results, times = self.pipeline.timed(self.leaves, wait=True)
        jax.block_until_ready(results)
        pairs = zip(self.program.instructions, times.done, strict=True)
        return sum(seconds for instruction, seconds in pairs if isinstance(instruction, Run))

    def host_seconds(self, *, alone: bool) -> dict[str, list[float]]:
        """Seconds of the host for each instruction of a step by its kind; `alone` if nothing else runs meanwhile."""
        results, times = self.pipeline.timed(self.leaves, wait=alone)
        jax.block_until_ready(results)
        found: dict[str, list[float]] = {"feed": [times.feed]}
        for instruction, seconds in zip(self.program.instructions, times.host, strict=True):
            found.setdefault(type(instruction).__name__, []).append(seconds)
        return found


def mlp(layers: int, width: int, rows: int) -> Training:
    """A perceptron of equal layers, trained by SGD with momentum on `rows` of random numbers."""
    keys = jax.random.split(jax.random.key(0), layers + 2)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[:layers]]
    batch = {name: jax.random.normal(key, (rows, width)) for name, key in zip("xy", keys[layers:], strict=True)}
    optimizer = optax.sgd(0.05, momentum=0.9)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Training(step=train_step, state=(params, optimizer.init(params)), batch=batch)


def load(training: Training, planner: autopar.Pipeline) -> Loaded:
    """The training as that pipeline on the first devices, one step taken. Raises PlanningError."""
    devices = jax.devices()[: sum(planner.submeshes)]
    parallel = autopar.parallelize(training.step, planner=planner, devices=devices)
    arguments = training.state, training.batch
    plan, traced = parallel.plan(*arguments), parallel.trace(*arguments)
    cut = stages.cut(traced.graph, plan.firsts, traced.tied)
    rows = {i: traced.graph.types[traced.graph.inputs[i]].shape[1] for i in traced.stacked}
    pipeline = runtime.load(build(traced, plan, cut, devices), rows, traced.out_tree, traced.weak)
    state, _ = pipeline(jax.tree.leaves((arguments, {})))
    return Loaded(plan=plan, pipeline=pipeline, leaves=jax.tree.leaves(((state, training.batch), {})))


def live_activations(program: Program, n_stages: int) -> tuple[int, ...]:
    """The most microbatches of which each stage keeps at once what its forward made and its backward reads."""
    read = {
        (slot, i.task.stage, i.task.microbatch)
        for i in program.instructions
        if isinstance(i, Run) and i.task is not None and i.task.kind != "forward"
        for slot in i.inputs
    }
    owner: dict[int, tuple[int, int]] = {}
    live: Counter[tuple[int, int]] = Counter()
    peak = [0] * n_stages
    for instruction in program.instructions:
        gone: tuple[int, ...] = ()
        match instruction:
            case Run(task=task, outputs=outputs) if task is not None and task.kind == "forward":
                key = (task.stage, task.microbatch)
                kept = [slot for slot in outputs if (slot, *key) in read]
                owner |= dict.fromkeys(kept, key)
                live[key] += len(kept)
                peak[task.stage] = max(peak[task.stage], sum(n > 0 for (k, _), n in live.items() if k == task.stage))
            case Run(segment=segment, inputs=inputs):
                gone = tuple(inputs[i] for i in program.segments[segment].donated)
            case Free(slots=slots):
                gone = slots
            case Send():
                pass
        for slot in gone:
            if slot in owner:
                live[owner.pop(slot)] -= 1
    return tuple(peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pipeline of the grid: medians in seconds, and what is in flight on each stage [stages]."""

    schedule: str
    n_stages: int
    microbatches: int
    predicted_bubble: float
    measured_bubble: float
    predicted_seconds: float
    measured_seconds: float
    peak_nbytes: int
    live: tuple[int, ...]
    bound: tuple[int, ...]
    run_seconds: float
    send_seconds: float


def measure(loaded: Loaded, rounds: int) -> Row:
    """The pipeline's row; steps and what they are compared with are timed in turn."""
    steps: list[float] = []
    serial: list[float] = []
    host: dict[str, list[float]] = {}
    for i in range(-1, rounds):
        step, one_by_one, kinds = loaded.seconds(), loaded.serial_seconds(), loaded.host_seconds(alone=False)
        if i >= 0:
            steps.append(step)
            serial.append(one_by_one)
            for kind, seconds in kinds.items():
                host.setdefault(kind, []).extend(seconds)
    plan = loaded.plan
    n_stages = len(plan.stages)
    step = statistics.median(steps)
    return Row(
        schedule=plan.schedule_name,
        n_stages=n_stages,
        microbatches=plan.microbatches,
        predicted_bubble=plan.bubble,
        measured_bubble=1 - statistics.median(serial) / (n_stages * step),
        predicted_seconds=plan.step_seconds,
        measured_seconds=step,
        peak_nbytes=plan.peak_nbytes,
        live=live_activations(loaded.program, n_stages),
        bound=in_flight(plan.schedule),
        run_seconds=statistics.median(host["Run"]),
        send_seconds=statistics.median(host.get("Send", [0.0])),
    )


def grid_table(rows: Sequence[Row], model: str) -> Table:
    """The grid, a pipeline a row."""
    title = f"{model}, stages of one device: predicted, measured"
    found = Table(title=title, title_justify="left", box=None, pad_edge=False)
    found.add_column("schedule", no_wrap=True)
    for heading in ("p", "m", "idle", "meas.", "step", "meas.", "peak", "alive", "bound", "host us"):
        found.add_column(heading, justify="right", no_wrap=heading not in ("alive", "bound"))
    for row in rows:
        alive, bound = (" ".join(map(str, counts)) for counts in (row.live, row.bound))
        found.add_row(
            row.schedule,
            str(row.n_stages),
            str(row.microbatches),
            f"{row.predicted_bubble:.0%}",
            f"{row.measured_bubble:.0%}",
            quantities.seconds(row.predicted_seconds),
            quantities.seconds(row.measured_seconds),
            quantities.nbytes(row.peak_nbytes),
            alive,
            bound,
            f"{row.run_seconds * 1e6:.0f}/{row.send_seconds * 1e6:.0f}",
            style="red" if any(a > b for a, b in zip(row.live, row.bound, strict=True)) else None,
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Median seconds of the host for the feed of a step and for each kind of instruction: in steps, and alone."""

    submeshes: tuple[int, ...]
    counts: dict[str, int]
    steps: dict[str, float]
    alone: dict[str, float]

    @property
    def misses(self) -> list[str]:
        """The bounds that are missed, each with its number."""
        pairs = zip(("Run", "Send"), BOUNDS.get(self.submeshes, ()), strict=False)
        return [
            f"{kind} on stages of {_sizes(self.submeshes)} devices: {self.steps[kind] * 1e6:.0f} us of the host, bound "
            f"{bound * 1e6:.0f} us"
            for kind, bound in pairs
            if self.steps[kind] > bound
        ]


def dispatch(submeshes: tuple[int, ...], rounds: int, microbatches: int = 8) -> Dispatch:
    """What instructions cost the host, of a perceptron too small to keep it waiting."""
    planner = autopar.Pipeline(stages=len(submeshes), microbatches=microbatches, submeshes=submeshes)
    loaded = load(mlp(layers=8, width=32, rows=16 * microbatches), planner)
    found: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
    for i in range(-2, rounds):
        for alone, kinds in found.items():
            for kind, seconds in loaded.host_seconds(alone=alone).items():
                if i >= 0:
                    kinds.setdefault(kind, []).extend(seconds)
    medians = {alone: {k: statistics.median(v) for k, v in kinds.items()} for alone, kinds in found.items()}
    counts = Counter(type(instruction).__name__ for instruction in loaded.program.instructions)
    return Dispatch(submeshes=submeshes, counts=counts | {"feed": 1}, steps=medians[False], alone=medians[True])


def yardstick(repeats: int = 300) -> float:
    """Median seconds that one bare `jax.device_put` keeps the host of this machine at this time."""
    source, target = jax.devices()[:2]
    array = jax.device_put(jnp.zeros(YARDSTICK_NBYTES // 4, jnp.float32), source)
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        moved = jax.device_put(array, target)
        seconds.append(time.perf_counter() - start)
        moved.block_until_ready()
    return statistics.median(seconds)


def dispatch_table(rows: Sequence[Dispatch]) -> Table:
    """What instructions cost, a kind a row."""
    found = Table(title="time of the host for an instruction, medians", title_justify="left")
    found.add_column("devices", no_wrap=True)
    found.add_column("kind", no_wrap=True)
    for heading in ("a step", "in a step", "alone", "target"):
        found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        bounds: dict[str, float] = dict(zip(("Run", "Send"), BOUNDS.get(row.submeshes, ()), strict=False))
        for kind in ("Run", "Send", "Free", "feed"):
            bound = bounds.get(kind)
            verdict = "" if bound is None else "met" if row.steps[kind] <= bound else "missed"
            found.add_row(
                _sizes(row.submeshes) if kind == "Run" else "",
                kind,
                str(row.counts[kind]),
                f"{row.steps[kind] * 1e6:.0f} us",
                f"{row.alone[kind] * 1e6:.0f} us",
                "" if bound is None else f"{bound * 1e6:.0f} us, {verdict}",
                style="red" if verdict == "missed" else None,
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Steps of two stages (`ours`) and the same stages one after the other (`plain`), in turn; the gain is of two
    programs that have nothing to do with each other, on the same devices at the same time.
    """

    microbatches: int
    n_stages: int
    seconds: Pairs
    control: float
    threads: float

    @property
    def allowed(self) -> float:
        """The speed-up of the closed form: m p / (m + p - 1)."""
        m, p = self.microbatches, self.n_stages
        return m * p / (m + p - 1)

    @property
    def gained(self) -> float:
        """The speed-up measured."""
        return 1 / self.seconds.ratio

    @property
    def share(self) -> float:
        """Of the allowed, what is gained."""
        return self.gained / self.allowed

    @property
    def best(self) -> float:
        """The share by the fastest step and the fastest serial one: what other work on the machine disturbs least."""
        return min(self.seconds.plain) / min(self.seconds.ours) / self.allowed

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the share."""
        low, high = self.seconds.interval()
        return 1 / high / self.allowed, 1 / low / self.allowed


def overlap(microbatches: int, rounds: int, *, layers: int = 48, width: int = 128, rows: int = 64) -> Overlap:
    """Two stages on a device each, of matrices that XLA multiplies by one thread."""
    planner = autopar.Pipeline(stages=2, microbatches=microbatches, submeshes=(1, 1))
    loaded = load(mlp(layers, width, rows * microbatches), planner)
    together: list[float] = []
    serial: list[float] = []
    gains: list[float] = []
    spent = used = 0.0
    alone = _control(layers // 2, width, rows)
    for i in range(-2, rounds):
        step = loaded.seconds()
        start, start_used = time.perf_counter(), time.process_time()
        one_by_one = loaded.serial_seconds()
        if i >= 0:
            spent += time.perf_counter() - start
            used += time.process_time() - start_used
            together.append(step)
            serial.append(one_by_one)
            gains.append(alone())
    return Overlap(
        microbatches=microbatches,
        n_stages=2,
        seconds=Pairs(ours=tuple(together), plain=tuple(serial)),
        control=statistics.median(gains),
        threads=used / spent,
    )


def _control(layers: int, width: int, rows: int, repeats: int = 8) -> Callable[[], float]:
    """How much faster two programs on two devices are at once than one after the other."""
    training = mlp(layers, width, rows)
    arguments = [jax.device_put((training.state, training.batch), device) for device in jax.devices()[:2]]
    step = jax.jit(training.step)
    jax.block_until_ready([step(*one) for one in arguments])

    def gain() -> float:
        start = time.perf_counter()
        for one in arguments * repeats:
            jax.block_until_ready(step(*one))
        between = time.perf_counter()
        jax.block_until_ready([step(*one) for one in arguments * repeats])
        return (between - start) / (time.perf_counter() - between)

    return gain


def overlap_table(rows: Sequence[Overlap]) -> Table:
    """Two stages at once, a number of microbatches a row."""
    title = "two stages of one device each, 1f1b, medians"
    found = Table(title=title, title_justify="left", padding=(0, 0))
    for heading in (
        "m",
        "serial",
        "ideal",
        "step",
        "speed-up",
        "allowed",
        "share",
        "95 %",
        "best",
        "control",
        "threads",
    ):
        found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        serial, step = (statistics.median(times) for times in (row.seconds.plain, row.seconds.ours))
        low, high = row.interval
        found.add_row(
            str(row.microbatches),
            quantities.seconds(serial),
            quantities.seconds(serial / row.allowed),
            quantities.seconds(step),
            f"{row.gained:.2f}",
            f"{row.allowed:.2f}",
            f"{row.share:.1%}",
            f"{low:.0%}-{high:.0%}",
            f"{row.best:.1%}",
            f"{row.control:.2f}",
            f"{row.threads:.2f}",
            style="red" if row.share < SHARE else None,
        )
    return found


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description=f"Run pipelines of a small model on {DEVICES} virtual CPU devices: bubble, step time and live "
        "activations of schedules, and what an instruction costs the host; or with --overlap two stages at once.",
        epilog="example: python -m benchmarks.pipeline --schedule 1f1b --stages 2 4 --microbatches 8",
    )
    number = {"type": int, "nargs": "+", "metavar": "N"}
    shown = "(default: %(default)s)"
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp", help=f"of the grid {shown}")
    parser.add_argument(
        "--schedule", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help=f"of the grid {shown}"
    )
    parser.add_argument("--stages", default=[2, 4], **number, help=f"of the grid, at most {DEVICES} {shown}")
    parser.add_argument("--microbatches", **number, help="of the grid (default: 4 8), or of --overlap (6 16 24)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help=f"measured steps of each {shown}")
    parser.add_argument("--overlap", action="store_true", help="measure two stages at once, and nothing else")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    args = parser.parse_args(argv)
    args.microbatches = args.microbatches or ([6, 16, 24] if args.overlap else [4, 8])
    if not all(1 <= n <= DEVICES for n in args.stages):
        parser.error(f"--stages {args.stages}: each has a device of its own, and there are {DEVICES}")
    if min(args.microbatches) < 1 or args.rounds < 1:
        parser.error("--microbatches and --rounds are 1 or more")
    return args


def grid(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(schedule, stages, microbatches) of each row."""
    return product(args.schedule, args.stages, args.microbatches)


def training_of(model: str, microbatches: int) -> Training:
    """The model of the grid; a microbatch has one size whatever their number."""
    if model == "gpt":
        return replace(MODELS["gpt"], batch=2 * microbatches).training()
    return mlp(layers=32, width=128, rows=64 * microbatches)


def main(argv: list[str] | None = None) -> int:
    """Prints the tables that the command line asks for; 1 if a target is missed and that is asked for too."""
    args = arguments(argv)
    console = Console(highlight=False)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    misses = show_overlap(args, console) if args.overlap else show_grid(args, console)
    for miss in misses:
        console.print(f"MISSED {miss}", style="red", soft_wrap=True)
    if not misses:
        console.print("all targets met")
    return bool(misses and args.strict)


def show_grid(args: argparse.Namespace, console: Console) -> list[str]:
    """Prints the grid and the cost of instructions; the misses."""
    rows = [
        measure(
            load(
                training_of(args.model, m), autopar.Pipeline(stages=p, microbatches=m, schedule=s, submeshes=(1,) * p)
            ),
            args.rounds,
        )
        for s, p, m in track(list(grid(args)), "pipelines", console=console, transient=True)
    ]
    console.print(grid_table(rows, args.model))
    cores = len(os.sched_getaffinity(0))
    floors = ", ".join(f"{max(0.0, 1 - cores / p):.0%} for {p} stages" for p in args.stages)
    console.print(
        "p stages, m microbatches; idle: the bubble, the share of all stages' time in which they wait, measured "
        f"against their work one by one; {cores} cores cannot do better than {floors}, which the prediction does not "
        "know; alive: most microbatches whose activations each stage keeps, beside the schedule's bound; host us: of "
        "the host for one Run and one Send",
    )
    found = [dispatch(submeshes, args.rounds) for submeshes in BOUNDS]
    console.print(dispatch_table(found))
    console.print(
        "in a step: the stages' threads and the host share the cores; alone: nothing else runs meanwhile; yardstick: "
        f"jax.device_put of {YARDSTICK_NBYTES // 1024} KB from device to device, alone: {yardstick() * 1e6:.0f} us"
    )
    over = [
        f"{row.schedule}, {row.n_stages} stages, {row.microbatches} microbatches: alive {row.live}, bound {row.bound}"
        for row in rows
        if any(a > b for a, b in zip(row.live, row.bound, strict=True))
    ]
    return over + [miss for row in found for miss in row.misses]


def show_overlap(args: argparse.Namespace, console: Console) -> list[str]:
    """Prints how stages overlap; the misses."""
    rows: list[Overlap] = []
    for m in args.microbatches:
        with console.status(f"{m} microbatches"):
            rows.append(overlap(m, args.rounds))
    console.print(overlap_table(rows))
    console.print(
        "serial: the same stages' work one by one; ideal: serial x (m + p - 1) / (m p); share: of the speed-up that "
        f"the closed form allows, target {SHARE:.0%}, with its bootstrap interval; best: by the fastest of each; "
        "control: what two programs that have nothing to do with each other gain at once, 2.00 where two cores "
        "are free, without which no target is in reach; threads: busy while the stages run one by one",
    )
    return [
        f"{row.microbatches} microbatches: {row.share:.1%} of the speed-up that is allowed, target {SHARE:.0%}"
        for row in rows
        if row.share < SHARE
    ]


def _sizes(submeshes: Sequence[int]) -> str:
    return "+".join(map(str, submeshes))


if __name__ == "__main__":
    raise SystemExit(main())
