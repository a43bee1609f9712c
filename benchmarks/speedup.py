"""The speed-up of two processes with a core each over one process on one core: `python -m benchmarks.speedup --help`.

The first process takes a step of `jax.jit` alone, on its core, while the second one waits; then both take one together,
data parallel and as a pipeline of two stages. Rounds of these are compared each by itself, so that what else the
machine does falls on all alike. Bounds: 1.6 times as fast for data parallel, 1.65 for two stages with 16 microbatches,
or exit status 1. The machine has to be quiet. The speed-up "if nothing waited" is that of the processor time of the
busier process, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.distributed import among
from autopar.tools.launch import Launch

BOUNDS = {"data parallel": 1.6, "two stages": 1.65}
"""The least speed-ups; two cores allow 2, and 16 microbatches on these two stages 1.80."""

MICROBATCHES = 16
BLOCKS, WIDTH, HIDDEN, ROWS = 4, 512, 2048, 256
"""Blocks of two products each, and rows of a microbatch: two seconds a step, of which little is spent elsewhere.

Each microbatch adds its gradients to earlier ones, 12 bytes of memory a weight, beside 6 operations a weight and row:
with 128 rows that is 12 % of what a stage computes on such a core, and two stages are 1.4 times as fast (`--rows 128`).

No gradient of the batch is computed, so the second stage has 12 of the 23 products. With two blocks it would have 6 of
11, and two stages could not be more than 1.73 times as fast.
"""

TOLERANCE = 1e-5
"""The relative difference that losses of the same step may have."""


def init(key: jax.Array) -> Any:
    """Random weights of residual blocks of two products each."""
    keys = jax.random.split(key, 2 * BLOCKS)
    shapes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] * BLOCKS
    return [jax.random.normal(k, shape) * shape[0] ** -0.5 for k, shape in zip(keys, shapes, strict=True)]


def step(params: Any, batch: jax.Array) -> Any:
    """One step of gradient descent on the blocks."""

    def loss(params: Any) -> jax.Array:
        x = batch
        for up, down in zip(params[::2], params[1::2], strict=True):
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


class Training:
    """A training that takes a step at a time; all processes of a parallel one have to take it."""

    def __init__(self, function: Callable[..., Any], params: Any, batch: Any) -> None:
        self.function, self.params, self.batch = function, params, batch

    def step(self) -> tuple[float, float, float]:
        """The seconds of one more step, the processor seconds of this process in it, and its loss."""
        start, computed = time.perf_counter(), time.process_time()
        self.params, loss = self.function(self.params, self.batch)
        jax.block_until_ready([leaf for leaf in self.params if leaf.addressable_shards])
        return time.perf_counter() - start, time.process_time() - computed, float(loss)


def measure(rounds: int, rows: int) -> int:
    """The exit status of one of the two processes, which both measure; the first one prints the results."""
    processes = among(jax.devices())
    assert processes is not None
    batch = np.random.default_rng(0).normal(size=(MICROBATCHES * rows, WIDTH)).astype(np.float32)
    params = jax.tree.map(np.asarray, init(jax.random.key(0)))
    planners = [autopar.DataParallel(), autopar.Pipeline(stages=2, microbatches=MICROBATCHES)]
    parallel = [autopar.parallelize(step, planner=planner, donate_argnums=0) for planner in planners]
    trainings = {"one process": Training(jax.jit(step, donate_argnums=0), params, batch)}
    trainings |= {name: Training(run, params, batch) for name, run in zip(BOUNDS, parallel, strict=True)}
    spent: dict[str, list[float]] = {name: [] for name in trainings}
    computed: dict[str, list[float]] = {name: [] for name in trainings}
    for number in range(-1, rounds):
        losses: list[float] = []
        for name, training in trainings.items():
            processes.gather("a step", "")
            if name != "one process" or processes.leads:
                seconds, work, loss = training.step()
                losses.append(loss)
                if number >= 0:
                    spent[name].append(seconds)
                    computed[name].append(work)
        if not np.ptp(losses) <= TOLERANCE * abs(losses[0]):  # nor where one is NaN
            sys.exit(f"the losses differ: {losses}")
    of_both = [json.loads(text) for text in processes.gather("what is computed", json.dumps(computed))]
    return verdict(spent, of_both) if processes.leads else 0


def verdict(spent: dict[str, list[float]], computed: list[dict[str, list[float]]]) -> int:
    """The exit status, 1 where a bound is missed; prints the seconds of steps and speed-ups."""
    alone = spent["one process"]
    print(f"{'one process':14} {statistics.median(alone):.3f} s", flush=True)
    is_met = True
    for name, bound in BOUNDS.items():
        ratio = statistics.median(before / after for before, after in zip(alone, spent[name], strict=True))
        works = map(max, *(process[name] for process in computed))
        most = statistics.median(b / a for b, a in zip(computed[0]["one process"], works, strict=True))
        is_met &= ratio >= bound
        times = f"{ratio:.2f} times as fast, bound {bound}; {most:.2f} if nothing waited"
        print(f"{name:14} {statistics.median(spent[name]):.3f} s, {times}", flush=True)
    return 0 if is_met else 1


def main() -> int:
    """The exit status: 1 where a bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speedup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="steps of each (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a microbatch (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.rounds, options.rows)
    arguments = ["--measure", "--rounds", str(options.rounds), "--rows", str(options.rows)]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    sizes: dict[str, Any] = {"processes": 2, "devices": 1, "bind_cores": True}
    launch = Launch(script=Path(__file__), arguments=arguments, environment=path, **sizes)
    return launch.run(sys.stdout, sys.stderr).status


if __name__ == "__main__":
    sys.exit(main())
