"""Train a GPT with an ordinary train step that autopar plans: `python -m benchmarks.gpt --help`.

The step is plain JAX, flax and optax; one decorator makes it parallel. On a CPU the devices are virtual: they share
the machine's cores, so the run shows that a plan is right, not that it is fast.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import jax
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import autopar
from autopar.tools.command import kept_plans
from benchmarks import corpus
from benchmarks.console import stdout
from benchmarks.gpt_options import OPTIMIZERS, PLANNERS, arguments
from models import gpt

EDGE_STEPS = 5  # how many losses make up the "first" and the "last" that are printed
HELD_OUT_BATCHES = 8
LINES = 20  # of progress that are printed where there is no terminal for a bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The measurements of a training run: a loss (nats per token) and seconds for each step, and the last state."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    state: TrainState

    @property
    def first_loss(self) -> float:
        """Mean loss of the first few steps."""
        return statistics.fmean(self.losses[:EDGE_STEPS])

    @property
    def last_loss(self) -> float:
        """Mean loss of the last few steps."""
        return statistics.fmean(self.losses[-EDGE_STEPS:])

    @property
    def step_seconds(self) -> float:
        """Median time of a step after the first, which compiles; of the first if there is no other."""
        return statistics.median(self.seconds[1:] or self.seconds)


def start_devices(requested: int | None, planner: str) -> int:
    """The number of devices the run uses, after starting JAX, with virtual devices if it is on the CPU.

    Raises SystemExit if `requested` devices cannot be had.
    """
    jax.config.update("jax_num_cpu_devices", requested or (1 if planner == "jit" else 8))  # other platforms ignore it
    count = jax.device_count()
    if requested not in (None, count):
        raise SystemExit(
            f"--devices {requested}, but this machine has {count} of kind {jax.devices()[0].device_kind}: leave the "
            "option out to use them all, or hide some (CUDA_VISIBLE_DEVICES)"
        )
    return 1 if planner == "jit" else count


def make_optimizer(name: str, learning_rate: float) -> optax.GradientTransformation:
    """The optimizer called `name`, with gradients clipped to a global norm of 1."""
    match name:
        case "adamw":
            update = optax.adamw(learning_rate, b2=0.95, weight_decay=0.1)
        case "sgd":
            update = optax.sgd(learning_rate, momentum=0.9)
        case _:
            raise ValueError(f"no optimizer is called {name!r}; there are {', '.join(OPTIMIZERS)}")
    return optax.chain(optax.clip_by_global_norm(1.0), update)


def make_state(config: gpt.Config, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state at step 0: parameters and the optimizer's own, on one device."""

    @jax.jit
    def create(key: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=None, params=gpt.init(config, key), tx=optimizer)

    return create(jax.random.key(seed))


def make_step(config: gpt.Config, seed: int) -> Callable[..., Any]:
    """An ordinary train step (state, batch) -> (state, loss), as one would write it for `jax.jit`."""

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(jax.random.key(seed), state.step) if config.dropout else None
        loss, gradients = jax.value_and_grad(lambda params: gpt.loss(config, params, batch, key))(state.params)
        return state.apply_gradients(grads=gradients), loss

    return train_step


def make_planner(name: str, devices: int, tensor: int) -> Any:
    """autopar's planner called `name`, for so many devices; megatron cuts each matrix over `tensor` of them.

    Raises SystemExit if `tensor` does not divide `devices`.
    """
    match name:
        case "auto":
            return autopar.Auto()
        case "dp":
            return autopar.DataParallel()
        case "megatron" if devices % tensor:
            raise SystemExit(f"--tensor {tensor} does not divide the {devices} devices: choose a divisor")
        case "megatron":
            return autopar.Megatron(data=devices // tensor, tensor=tensor)
        case "zero3":
            return autopar.Zero(3)
        case _:
            raise ValueError(f"no planner is called {name!r}; there are {', '.join(PLANNERS)}")


def train(
    step: Callable[..., Any],
    state: TrainState,
    batches: Iterator[dict[str, Any]],
    *,
    steps: int,
    tokens: int,
    console: Console,
) -> Run:
    """The run of `steps` steps of `tokens` tokens each, from `state`, which is used up; shows its progress."""
    losses, seconds = [], []
    with progress(console, steps, "tokens") as show:
        for batch in islice(batches, steps):
            start = time.perf_counter()
            state, loss = step(state, batch)
            losses.append(float(loss))  # waits for the step, so that the time is the step's own
            seconds.append(time.perf_counter() - start)
            show(losses[-1], tokens / seconds[-1])
    return Run(losses=tuple(losses), seconds=tuple(seconds), state=state)


@contextmanager
def progress(console: Console, steps: int, unit: str) -> Iterator[Callable[[float, float], None]]:
    """A function of (loss, units a second) to call after each step: it moves a bar or, without a terminal, prints."""
    if console.is_terminal:
        columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[rates]}"), console=console) as bar:
            task = bar.add_task("training", total=steps, rates="compiling")
            yield lambda loss, rate: bar.update(task, advance=1, rates=f"loss {loss:.3f}  {rate:,.0f} {unit}/s")
        return

    done = 0
    every = max(1, steps // LINES)

    def print_line(loss: float, rate: float) -> None:
        nonlocal done
        done += 1
        if done in (1, steps) or done % every == 0:
            console.print(
                f"step {done:>{len(str(steps))}}/{steps}  loss {loss:.3f}  {rate:,.0f} {unit}/s", soft_wrap=True
            )

    yield print_line


def held_out_loss(config: gpt.Config, params: Any, text: Any, batch_size: int) -> float:
    """Mean loss in nats per token on the text held out, without dropout, on one device."""
    params = jax.device_get(params)
    loss = jax.jit(partial(gpt.loss, config))
    batches = corpus.batches(text, batch_size=batch_size, sequence_length=config.sequence_length, seed=0)
    return statistics.fmean(float(loss(params, batch)) for batch in islice(batches, HELD_OUT_BATCHES))


def result_table(run: Run, tokens: int, flops: float, held_out: float) -> Table:
    """The table of what the run measured, to print at its end."""
    table = Table(title="result", show_header=False, title_justify="left")
    table.add_row("first loss", f"{run.first_loss:.3f} nats a byte, mean of {min(EDGE_STEPS, len(run.losses))} steps")
    table.add_row("last loss", f"{run.last_loss:.3f}")
    table.add_row("held-out loss", f"{held_out:.3f}, or {held_out / math.log(2):.3f} bits a byte")
    table.add_row("step", f"{run.step_seconds * 1e3:,.1f} ms, median after the first")
    table.add_row("first step", f"{run.seconds[0]:.1f} s, with compilation")
    table.add_row("all steps", f"{sum(run.seconds):.1f} s")
    table.add_row("speed", f"{tokens / run.step_seconds:,.0f} tokens/s, {flops / run.step_seconds / 1e9:,.1f} GFLOP/s")
    return table


def comparison_table(planner: str, run: Run, plain: Run) -> Table:
    """A `planner`'s run beside the `plain` one of jax.jit over the same batches, and how far their losses differ."""
    table = Table("", planner, "jit", title="comparison", title_justify="left")
    table.add_row("last loss", f"{run.last_loss:.3f}", f"{plain.last_loss:.3f}")
    table.add_row("step", f"{run.step_seconds * 1e3:,.1f} ms", f"{plain.step_seconds * 1e3:,.1f} ms")
    differences = [abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)]
    table.add_row("loss differs by", f"{differences[0]:.1e} in step 1", f"at most {max(differences):.1e}")
    return table


def example(preset: str = "350M") -> tuple[Any, tuple[Any, ...]]:
    """GPT 350M's step and shapes at batch 64: `autopar plan benchmarks.gpt:example --cluster 8:a100-80g`."""
    config, optimizer = replace(gpt.Config.preset(preset), dtype="bfloat16"), make_optimizer("adamw", 1e-3)
    state = jax.eval_shape(lambda: make_state(config, optimizer, 0))
    batch = jax.eval_shape(lambda: gpt.example_batch(config, 64, jax.random.key(0)))
    return autopar.parallelize(make_step(config, 0), donate_argnums=(0,)), (state, batch)


def tiny() -> tuple[Any, tuple[Any, ...]]:
    """The smallest GPT's step and shapes at batch 64."""
    return example("tiny")


def presets() -> dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]]:
    """The examples of all sizes by name, smallest first, for `autopar fit benchmarks.gpt:example`."""
    return {name: partial(example, name) for name in gpt.PRESETS}


def planned(
    args: argparse.Namespace,
    train_step: Callable[..., Any],
    state: TrainState,
    batch: dict[str, Any],
    devices: int,
    console: Console,
) -> Callable[..., Any]:
    """`train_step` made parallel, for arguments of these shapes; prints its plan and saves it.

    Raises SystemExit if the planner has no plan.
    """
    planner = args.pipeline or make_planner(args.planner, devices, args.tensor)
    microbatches = None if args.pipeline else args.microbatches
    step = autopar.parallelize(
        train_step,
        planner=planner,
        microbatches=microbatches,
        donate_argnums=(0,),
        cache=None if args.no_cache else kept_plans(),
    )
    start = time.perf_counter()
    try:
        plan = step.plan(state, batch)
    except autopar.PlanningError as error:  # as for stages that do not share the devices
        raise SystemExit(str(error)) from error
    seconds = time.perf_counter() - start
    console.print(plan.format(width=min(console.width, 120)), markup=False, soft_wrap=True)
    plan.save(args.out)
    console.print(f"planned in {seconds:.1f} s, saved to {args.out}", soft_wrap=True)
    return step


def main(argv: list[str] | None = None) -> None:
    """Trains as the command line says, and prints the plan and the results."""
    args = arguments(argv)
    console = stdout()
    devices = start_devices(args.devices, args.planner)
    config = replace(gpt.Config.preset(args.preset), dropout=args.dropout)
    optimizer = make_optimizer(args.optimizer, args.learning_rate)
    train_step = make_step(config, args.seed)
    text = corpus.read()
    tokens = args.batch * config.sequence_length
    console.print(
        f"GPT {args.preset}, {gpt.parameters(config):,} parameters; {tokens:,} tokens a step from "
        f"{len(text.train):,} bytes of text; {devices} x {jax.devices()[0].device_kind}, planner {args.planner}",
        soft_wrap=True,
    )

    plain_step = jax.jit(train_step, donate_argnums=(0,))
    step = plain_step
    if args.planner != "jit":
        state = jax.eval_shape(lambda: make_state(config, optimizer, args.seed))
        batch = jax.eval_shape(lambda: gpt.example_batch(config, args.batch, jax.random.key(0)))
        step = planned(args, train_step, state, batch, devices, console)

    def run(step: Callable[..., Any]) -> Run:
        sizes = {"batch_size": args.batch, "sequence_length": config.sequence_length}
        batches = corpus.batches(text.train, **sizes, seed=args.seed)
        state = make_state(config, optimizer, args.seed)
        return train(step, state, batches, steps=args.steps, tokens=tokens, console=console)

    result = run(step)
    held_out = held_out_loss(config, result.state.params, text.held_out, args.batch)
    console.print(result_table(result, tokens, gpt.flops(config, args.batch), held_out))
    if args.compare == "jit":
        console.print("again, with plain jax.jit on one device")
        console.print(comparison_table(args.planner, result, run(plain_step)))


if __name__ == "__main__":
    main()
