"""Times of a step of experts whose gradients are scattered: `python -m benchmarks.transposed_products`.

JAX computes the gradient of weights [experts, in, out] as [experts, out, in], and transposes it. XLA:CPU then has the
sum in the first order and the weights in the second, and copies both element by element; autopar exchanges the
operands of such a product instead. Here experts of a summed square train by `jax.jit` and by autopar's program, under
the same shardings.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks.beside_jit import beside_jit, print_rows
from benchmarks.trainings import Training

Weights = tuple[jax.Array, ...]
"""Those of the first layers of the experts, and of the second ones."""

BOUND = 1e-5
"""The largest relative difference of the weights."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transposed_products",
        description="Time a step of experts under ZeRO-2, by jit and by autopar's program.",
    )
    number, shown = {"type": int, "metavar": "N"}, "(default: %(default)s)"
    parser.add_argument("--devices", default=8, **number, help=f"virtual CPUs {shown}")
    parser.add_argument("--experts", nargs="+", default=(1, 4, 8), **number, help=f"several numbers of them {shown}")
    parser.add_argument(
        "--features", default=128, **number, help=f"of a token; an expert has 8 times as many inside {shown}"
    )
    parser.add_argument("--tokens", default=32, **number, help=f"of each expert on a device {shown}")
    parser.add_argument("--rounds", default=40, **number, help=f"steps of each program, in turn {shown}")
    return parser.parse_args(argv)


def training(groups: int, experts: int, features: int, tokens: int) -> Training:
    """A step of gradient descent with momentum: a group of tokens a device, through experts of two layers."""

    def loss(weights: Weights, batch: jax.Array) -> jax.Array:
        up, down = weights
        inside = jnp.tanh(jnp.einsum("gecd,edf->gecf", batch, up))
        return jnp.sum(jnp.einsum("gecf,efd->gecd", inside, down) ** 2)

    def step(state: tuple[Weights, Weights], batch: jax.Array) -> tuple[tuple[Weights, Weights], jax.Array]:
        weights, moments = state
        total, gradients = jax.value_and_grad(loss)(weights, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return (jax.tree.map(lambda w, m: w - 1e-6 * m, weights, moments), moments), total

    draw = np.random.default_rng(0).normal
    shapes = (experts, features, 8 * features), (experts, 8 * features, features)
    weights = tuple(jnp.asarray(draw(scale=0.02, size=shape), "float32") for shape in shapes)
    batch = jnp.asarray(draw(size=(groups, experts, tokens, features)), "float32")
    return Training(step=step, state=(weights, jax.tree.map(jnp.zeros_like, weights)), batch=batch)


def row(experts: int, args: argparse.Namespace) -> tuple[tuple[str, ...], float]:
    """The cells of so many experts, and the largest relative difference."""
    case = training(args.devices, experts, args.features, args.tokens)
    cells, worst = beside_jit(case, args.devices, args.rounds, autopar.Zero(2))
    return (str(experts), *cells), worst


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where results differ."""
    args = arguments(list(argv) if argv is not None else None)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    results = [row(experts, args) for experts in args.experts]
    return print_rows(f"experts on {args.devices} devices, median step", ["experts"], results, BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
