"""Times of a data-parallel softmax's gradient with one row a device and with more: `python -m benchmarks.single_rows`.

XLA:CPU is slow at a sum of products whose result keeps a dimension of one element, as the batch is where a device has
one row; planned programs sum over that dimension as well. Here random gradients go back through the softmax of
attention's scores, by `jax.jit` and by autopar's program under the same shardings.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks.beside_jit import beside_jit, print_rows
from benchmarks.trainings import Training

BOUND = 1e-6
"""The largest relative difference of the gradients."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.single_rows",
        description="Time the gradient of a softmax under data parallelism, by jit and by autopar's program.",
    )
    number, shown = {"type": int, "metavar": "N"}, "(default: %(default)s)"
    parser.add_argument("--devices", default=8, **number, help=f"virtual CPUs {shown}")
    parser.add_argument("--rows", nargs="+", default=(1, 2, 4), **number, help=f"of the batch on a device {shown}")
    parser.add_argument(
        "--heads", default=16, **number, help=f"of one row; of several, divided by their number {shown}"
    )
    parser.add_argument("--tokens", default=128, **number, help=f"of a sequence {shown}")
    parser.add_argument("--rounds", default=40, **number, help=f"steps of each program, in turn {shown}")
    return parser.parse_args(argv)


def training(rows: int, heads: int, tokens: int) -> Training:
    """A step that gives the scores' gradient through their softmax, of random scores and gradients."""

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        _, back = jax.vjp(lambda scores: jax.nn.softmax(scores, axis=-1), batch["scores"])
        return state, back(batch["gradients"])[0]

    draw = np.random.default_rng(0).normal
    shape = (rows, heads, tokens, tokens)
    batch = {name: jnp.asarray(draw(size=shape), "float32") for name in ("scores", "gradients")}
    return Training(step=step, state=jnp.zeros(()), batch=batch)


def row(rows: int, args: argparse.Namespace) -> tuple[tuple[str, ...], float]:
    """The cells of so many rows a device, and the largest relative difference."""
    case = training(rows * args.devices, max(1, args.heads // rows), args.tokens)
    cells, worst = beside_jit(case, args.devices, args.rounds, autopar.DataParallel())
    return (str(rows), *cells), worst


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where results differ."""
    args = arguments(list(argv) if argv is not None else None)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    results = [row(rows, args) for rows in args.rows]
    title = f"gradient of a softmax on {args.devices} devices, median step"
    return print_rows(title, ["rows a device"], results, BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
