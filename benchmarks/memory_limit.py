"""Plans within a memory limit, compiled, run and compared with `jax.jit`: `python -m benchmarks.memory_limit --help`.

The limit is a share, by default a quarter, of the bytes that plain `jax.jit` needs for a step of a GPT. With `--large`,
models of papers are planned for the papers' clusters, from shapes alone; one of the clusters is too small.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import autopar
from benchmarks.console import stdout
from benchmarks.equality import difference, mesh_text
from benchmarks.heaps import step_nbytes
from benchmarks.one_device import make_step
from models import gpt
from passes.errors import OverBudgetError
from passes.text import quantities

DEVICES = 8
SLOWER = 1.15
"""The most that a step under the limit may take, as a multiple of the one that is planned without a limit."""

TOO_SMALL = "GPT-3 175B on 8 A100"

LARGE = {
    "GPT 39B on 64 V100": ("39B", "8x8:v100-16g", 1024),
    "GPT-3 175B on 64 A100": ("175B", "8x8:a100-80g", 512),
    TOO_SMALL: ("175B", "8:a100-80g", 64),
}
"""Preset, cluster and sequences of a step by title; the plan of `TOO_SMALL` is to be refused."""
GPT3 = gpt.Config(vocab_size=51200, sequence_length=2048, hidden=12288, layers=96, heads=96)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_limit",
        description=f"Train a GPT on {DEVICES} virtual CPU devices under a quarter of the memory that plain jax.jit "
        "takes: peak bytes as XLA has them, difference from jit, and the predicted step time beside that of the plan "
        "without a limit. Exits with 1 if a bound is missed.",
        epilog="example: python -m benchmarks.memory_limit --share 0.25 --share 0.05",
    )
    parser.add_argument(
        "--share",
        type=float,
        action="append",
        metavar="X",
        help="the limit, of jit's memory; again for more (default: 0.25)",
    )
    parser.add_argument("--batch", default=32, type=int, metavar="N", help="sequences a step (default: %(default)s)")
    parser.add_argument("--large", action="store_true", help="plan the papers' models for their clusters instead")
    return parser.parse_args(argv)


def nbytes(compiled: Any) -> int:
    """Bytes that one device needs of a compiled step, by XLA's account."""
    return step_nbytes(compiled.memory_analysis())


def under(shares: list[float], batch_size: int, console: Console) -> int:
    """The exit status of a GPT planned, compiled and run under shares of jit's memory: 1 where a bound is missed."""
    config = gpt.Config.tiny()
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = make_step(config, optimizer)
    params = jax.jit(partial(gpt.init, config))(jax.random.key(0))
    state, batch = (params, optimizer.init(params)), gpt.example_batch(config, batch_size, jax.random.key(1))
    serial = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    expected = serial(jax.tree.map(jnp.copy, state), batch)
    free = autopar.parallelize(step, donate_argnums=0).plan(state, batch)
    table = Table(
        title=f"GPT of 0.8 M parameters, batch {batch_size}, {DEVICES} devices; jit needs "
        f"{quantities.nbytes(nbytes(serial))}, the plan without a limit {quantities.nbytes(free.peak_nbytes)} a device"
    )
    for heading in ("limit", "/ jit", "planned peak", "compiled", "plan", "step", "/ no limit", "differs", "planning"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    missed: list[str] = []
    for fraction in shares:
        limit = int(fraction * nbytes(serial))
        start = time.perf_counter()
        try:
            lowered = autopar.parallelize(step, donate_argnums=0, memory_limit=limit).lower(state, batch)
        except OverBudgetError as error:
            missed.append(f"{fraction:g} of jit's memory: {error}")
            continue
        planning = time.perf_counter() - start
        compiled = lowered.compile()
        plan = compiled.plan
        off = difference(compiled(jax.tree.map(jnp.copy, state), batch), expected)
        slower = plan.step_seconds / free.step_seconds
        table.add_row(
            quantities.nbytes(limit),
            f"{fraction:g}",
            quantities.nbytes(plan.peak_nbytes),
            quantities.nbytes(nbytes(compiled)),
            measures_of(plan),
            quantities.seconds(plan.step_seconds),
            f"{slower:.2f}",
            f"{off:.0e}",
            f"{planning:.1f} s",
        )
        if nbytes(compiled) > limit:
            missed.append(
                f"{fraction:g} of jit's memory: compiled, the step needs {quantities.nbytes(nbytes(compiled))}"
            )
        if slower > SLOWER:
            missed.append(f"{fraction:g} of jit's memory: {slower:.2f} times the step without a limit, bound {SLOWER}")
    console.print(table)
    for line in missed:
        console.print(f"MISSED {line}")
    return 1 if missed else 0


def measures_of(plan: Any) -> str:
    """The measures by which a plan fits its limit, in words: its mesh, microbatches, recomputed layers, offloading."""
    parts = [f"mesh {mesh_text(plan)}"]
    if plan.microbatches > 1:
        parts.append(f"{plan.microbatches} microbatches")
    if plan.remat:
        again = sum(policy != "everything" for policy in plan.remat)
        parts.append(f"{again} of {len(plan.remat)} layers recompute")
    if plan.offloaded:
        parts.append("state with the host")
    return ", ".join(parts)


def large(console: Console) -> int:
    """The exit status of the papers' models, planned: 1 where one does not fit, or where the one too large does."""
    status = 0
    for title, (preset, cluster, rows) in LARGE.items():
        config = GPT3 if preset == "175B" else gpt.Config.preset(preset)
        config = replace(config, dtype="bfloat16", param_dtype="float32", remat=True, scan_layers=True)
        start = time.perf_counter()
        try:
            plan = planned(config, cluster, rows)
            console.print(
                f"{title}: {quantities.nbytes(plan.peak_nbytes)} a device, {measures_of(plan)}, step "
                f"{quantities.seconds(plan.step_seconds)}, planned in {time.perf_counter() - start:.0f} s"
            )
            console.print(f"  {', '.join(f'{quantities.nbytes(v)} {cause}' for cause, v in plan.nbytes.items())}")
            status |= title == TOO_SMALL
        except OverBudgetError as error:
            console.print(f"{title}: does not fit, after {time.perf_counter() - start:.0f} s\n{error}", markup=False)
            status |= title != TOO_SMALL
    return status


def planned(config: gpt.Config, cluster: str, rows: int) -> Any:
    """The plan of an AdamW step of a GPT."""
    optimizer = optax.adamw(1e-4)
    step: Callable[..., Any] = make_step(config, optimizer)
    params = jax.eval_shape(partial(gpt.init, config), jax.random.key(0))
    state = (params, jax.eval_shape(optimizer.init, params))
    batch = jax.eval_shape(lambda: gpt.example_batch(config, rows, jax.random.key(1)))
    return autopar.parallelize(step, donate_argnums=0, cluster=cluster).plan(state, batch)


def main() -> int:
    """Trains and plans within limits and prints what it takes; 1 where a bound is missed."""
    args = arguments()
    console = stdout()
    if args.large:
        return large(console)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    return under(args.share or [0.25], args.batch, console)


if __name__ == "__main__":
    raise SystemExit(main())
