"""Seconds to find a plan in the cache, beside those of making it: `python -m benchmarks.cache --help`."""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.table import Table

import autopar
from benchmarks.console import stdout
from benchmarks.gpt import make_optimizer, make_state, make_step
from models import gpt
from passes.text import quantities

BOUND_SECONDS = 0.5
"""Seconds beyond tracing in which a plan is to be found in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Median seconds of tracing a model, of planning it, and of finding its plan in the cache instead."""

    model: str
    operators: int
    trace_seconds: float
    cold_seconds: float
    cache_seconds: float
    entry_nbytes: int

    @property
    def misses(self) -> bool:
        """Whether the plan was found too late."""
        return self.cache_seconds > BOUND_SECONDS


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache",
        description="Plan GPTs' train steps and keep the plans in a folder, then find them there. Exits with 1 if that "
        f"takes more than {BOUND_SECONDS} s beyond tracing.",
        epilog="example: python -m benchmarks.cache --model tiny --model 125M",
    )
    parser.add_argument("--model", choices=gpt.PRESETS, action="append", help="give it again for more (default: tiny)")
    parser.add_argument(
        "--cluster", default="1x8:a100-80g", metavar="HOSTSxDEVICES:KIND", help="(default: %(default)s)"
    )
    parser.add_argument("--batch", default=16, type=int, metavar="N", help="sequences a step (default: %(default)s)")
    parser.add_argument("--rounds", default=5, type=int, metavar="N", help="times to find it (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(argv)


def timed(model: str, cluster: str, batch_size: int, folder: str | None) -> tuple[float, float, Any]:
    """(seconds of tracing, seconds until the plan is there, the plan), of a step that is traced and planned afresh."""
    config, optimizer = gpt.Config.preset(model), make_optimizer("adamw", 1e-3)
    state = jax.eval_shape(lambda: make_state(config, optimizer, 0))
    batch = jax.eval_shape(lambda: gpt.example_batch(config, batch_size, jax.random.key(0)))
    step = autopar.parallelize(make_step(config, 0), cluster=cluster, donate_argnums=(0,), cache=folder)
    start = time.perf_counter()
    step.trace(state, batch)
    traced = time.perf_counter()
    plan = step.plan(state, batch)
    return traced - start, time.perf_counter() - traced, plan


def find(model: str, cluster: str, batch_size: int, rounds: int) -> Found:
    """The measurements of one model."""
    with tempfile.TemporaryDirectory() as folder:
        _, cold, plan = timed(model, cluster, batch_size, folder)
        runs = [timed(model, cluster, batch_size, folder) for _ in range(rounds)]
        assert all(run[2] == plan for run in runs)
        (entry,) = os.scandir(folder)
        nbytes = entry.stat().st_size
    return Found(
        model=model,
        operators=len(plan.operators),
        trace_seconds=statistics.median(run[0] for run in runs),
        cold_seconds=cold,
        cache_seconds=statistics.median(run[1] for run in runs),
        entry_nbytes=nbytes,
    )


def table(results: list[Found]) -> Table:
    """One model a row; what is found too late in red."""
    drawn = Table(title="plans from the cache, beyond tracing", title_justify="left")
    for name in ("model", "operators", "trace", "plan", "find in cache", "bytes kept"):
        drawn.add_column(name, justify="left" if name == "model" else "right")
    for r in results:
        seconds = map(quantities.seconds, (r.trace_seconds, r.cold_seconds, r.cache_seconds))
        drawn.add_row(
            r.model,
            f"{r.operators:,}",
            *seconds,
            quantities.nbytes(r.entry_nbytes),
            style="red" if r.misses else None,
        )
    return drawn


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 if a plan is found too late."""
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    results = [find(model, args.cluster, args.batch, args.rounds) for model in args.model or ["tiny"]]
    if args.json:
        print(json.dumps([asdict(r) for r in results], indent=1))
    else:
        stdout().print(table(results))
    return int(any(r.misses for r in results))


if __name__ == "__main__":
    raise SystemExit(main())
