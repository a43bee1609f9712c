"""Predicted against measured step time and memory on this machine: `python -m benchmarks.predictions --help`.

The devices are virtual CPUs that share the machine's cores, which the cost model does not know: read the ratios, and
above all whether the planners come in the same order, rather than the times. Nothing here has a bound.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import optax
from rich.table import Table

import autopar
from benchmarks.console import stdout
from benchmarks.equality import mesh_text
from benchmarks.heaps import step_nbytes
from benchmarks.one_device import make_step
from models import gpt
from passes.text import quantities

DEVICES = 8
WARM_UP = 2

PLANNERS: dict[str, Callable[[], Any]] = {
    "auto": autopar.Auto,
    "dp": autopar.DataParallel,
    "zero2": lambda: autopar.Zero(2),
    "zero3": lambda: autopar.Zero(3),
    "megatron 4x2": lambda: autopar.Megatron(data=4, tensor=2),
    "megatron 2x4": lambda: autopar.Megatron(data=2, tensor=4),
    "megatron 1x8": lambda: autopar.Megatron(data=1, tensor=8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan's step seconds and peak bytes of a device, predicted and measured; `spread` has the outer quartiles."""

    planner: str
    mesh: str
    predicted_seconds: float
    measured_seconds: float
    spread: tuple[float, float]
    predicted_nbytes: int
    measured_nbytes: int

    @property
    def seconds_ratio(self) -> float:
        """Predicted seconds divided by measured ones."""
        return self.predicted_seconds / self.measured_seconds

    @property
    def nbytes_ratio(self) -> float:
        """Predicted bytes divided by measured ones."""
        return self.predicted_nbytes / self.measured_nbytes


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predictions",
        description=f"Run a GPT on {DEVICES} virtual CPU devices under each planner, and print the plan's step time "
        "and peak bytes a device beside those measured (bytes: arguments + outputs - aliased + temporaries, as XLA "
        "reports them for one device).",
        epilog="example: python -m benchmarks.predictions --planner auto --planner dp --batch 32",
    )
    parser.add_argument(
        "--planner", choices=tuple(PLANNERS), action="append", help="give it again for more (default: all)"
    )
    parser.add_argument("--layers", default=2, type=int, metavar="N", help="of GPT tiny (default: %(default)s)")
    parser.add_argument("--batch", default=16, type=int, metavar="N", help="sequences a step (default: %(default)s)")
    parser.add_argument("--steps", default=15, type=int, metavar="N", help="measured steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(argv)


def measure(planner: str, config: gpt.Config, batch_size: int, steps: int) -> Prediction:
    """One planner's prediction and measurement."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    train_step = make_step(config, optimizer)
    params = jax.jit(lambda key: gpt.init(config, key))(jax.random.key(0))
    state = (params, optimizer.init(params))
    batch = gpt.example_batch(config, batch_size, jax.random.key(1))
    parallel = autopar.parallelize(train_step, planner=PLANNERS[planner](), donate_argnums=(0,))
    compiled = parallel.lower(state, batch).compile()
    plan = compiled.plan
    seconds: list[float] = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        state, loss = compiled(state, batch)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - start)
    measured = seconds[WARM_UP:]
    low, _, high = statistics.quantiles(measured, n=4) if len(measured) > 1 else measured * 3
    return Prediction(
        planner=planner,
        mesh=mesh_text(plan),
        predicted_seconds=plan.step_seconds,
        measured_seconds=statistics.median(measured),
        spread=(low, high),
        predicted_nbytes=plan.peak_nbytes,
        measured_nbytes=step_nbytes(compiled.memory_analysis()),
    )


def table(rows: list[Prediction]) -> Table:
    """One planner a row; ratios are predicted / measured."""
    shown = Table(title="one step, one device: predicted and measured", title_justify="left", padding=(0, 0))
    shown.add_column("planner", no_wrap=True)
    shown.add_column("mesh", no_wrap=True)
    for name in ("predicted step", "measured", "quartiles", "ratio", "predicted peak", "measured", "ratio"):
        shown.add_column(name, justify="right", no_wrap=True)
    for p in rows:
        low, high = p.spread
        shown.add_row(
            p.planner,
            p.mesh,
            quantities.seconds(p.predicted_seconds),
            quantities.seconds(p.measured_seconds),
            f"{low * 1e3:.0f}-{high * 1e3:.0f} ms",
            f"{p.seconds_ratio:.2f}",
            quantities.nbytes(p.predicted_nbytes),
            quantities.nbytes(p.measured_nbytes),
            f"{p.nbytes_ratio:.2f}",
        )
    return shown


def ordered_pairs(rows: list[Prediction], key: Callable[[Prediction], tuple[float, float]]) -> str:
    """The number of pairs of planners that are predicted in their measured order, of all, by (predicted, measured)."""
    pairs = [(key(a), key(b)) for i, a in enumerate(rows) for b in rows[:i]]
    right = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 or a[0] == b[0] for a, b in pairs)
    return f"{right} of {len(pairs)} pairs"


def main(argv: list[str] | None = None) -> int:
    """Prints the table that the command line asks for; always 0."""
    args = arguments(argv)
    console = stdout()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    config = replace(gpt.Config.preset("tiny"), layers=args.layers)
    rows: list[Prediction] = []
    for planner in args.planner or PLANNERS:
        with console.status(f"{planner}: planning, compiling, running"):
            rows.append(measure(planner, config, args.batch, args.steps))
    if args.json:
        ratios = [{"seconds_ratio": p.seconds_ratio, "nbytes_ratio": p.nbytes_ratio} for p in rows]
        print(json.dumps([asdict(p) | r for p, r in zip(rows, ratios, strict=True)], indent=1))
        return 0
    console.print(table(rows))
    console.print(
        f"GPT tiny with {args.layers} layers, batch {args.batch} sequences, median of {args.steps} steps; ratio: "
        f"predicted / measured. {DEVICES} virtual devices share {os.cpu_count()} cores."
    )
    if len(rows) > 1:
        console.print(
            f"in the measured order: {ordered_pairs(rows, lambda p: (p.predicted_seconds, p.measured_seconds))} by "
            f"time, {ordered_pairs(rows, lambda p: (p.predicted_nbytes, p.measured_nbytes))} by memory"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
