"""Times of convolutions' gradients inside a loop and outside: `python -m benchmarks.convolutions --help`.

XLA:CPU transposes operands into the order that its library's convolutions take in the entry computation alone. In the
body of a loop it computes convolutions in another order, such as gradients, element by element; planned programs
transpose the operands themselves.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopar
from benchmarks.beside_jit import beside_jit, print_rows
from benchmarks.trainings import Training

BOUND = 1e-5
"""The largest relative difference of the gradients."""

LAYOUTS = {"features last": ("NHWC", "HWIO", "NHWC"), "features first": ("NCHW", "OIHW", "NCHW")}
"""The dimensions of images, kernels and results; XLA:CPU's library takes features last."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convolutions",
        description="Time the gradients of two convolutions under data parallelism, all images at once and in a loop "
        "over parts of them, by jit and by autopar's program.",
    )
    number, shown = {"type": int, "metavar": "N"}, "(default: %(default)s)"
    parser.add_argument("--devices", default=8, **number, help=f"virtual CPUs {shown}")
    parser.add_argument("--images", default=64, **number, help=f"of a batch {shown}")
    parser.add_argument("--pixels", default=16, **number, help=f"of an image's side {shown}")
    parser.add_argument("--channels", default=16, **number, help=f"of an image and of each layer {shown}")
    parser.add_argument(
        "--parts", nargs="+", default=(1, 4), **number, help=f"that a loop goes over; 1: no loop {shown}"
    )
    parser.add_argument("--rounds", default=20, **number, help=f"steps of each program, in turn {shown}")
    return parser.parse_args(argv)


def training(layout: tuple[str, str, str], images: int, pixels: int, channels: int, parts: int) -> Training:
    """A step that moves two kernels by the gradients of a sum of squares, summed over parts of the images."""
    sizes = {"N": images, "C": channels, "H": pixels, "W": pixels}
    window = {"O": channels, "I": channels, "H": 3, "W": 3}

    def loss(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout))
        return jnp.sum(x**2)

    def step(kernels: list[jax.Array], batch: dict[str, jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        def part_added(sums: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            value, gradients = jax.value_and_grad(loss)(kernels, x)
            return jax.tree.map(jnp.add, sums, gradients), value

        x = batch["images"]
        sums = jax.tree.map(jnp.zeros_like, kernels)
        if parts == 1:
            sums, value = part_added(sums, x)
        else:
            pieces = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
            sums, values = lax.scan(part_added, sums, pieces)
            value = values.sum()
        return jax.tree.map(lambda w, g: w - 1e-6 * g, kernels, sums), value

    draw = np.random.default_rng(0).normal
    shape, kernel = tuple(sizes[d] for d in layout[0]), tuple(window[d] for d in layout[1])
    kernels = [jnp.asarray(draw(scale=0.1, size=kernel), "float32") for _ in range(2)]
    return Training(step=step, state=kernels, batch={"images": jnp.asarray(draw(size=shape), "float32")})


def row(name: str, parts: int, args: argparse.Namespace) -> tuple[tuple[str, ...], float]:
    """The cells of a layout in so many parts, and the largest relative difference."""
    case = training(LAYOUTS[name], args.images, args.pixels, args.channels, parts)
    cells, worst = beside_jit(case, args.devices, args.rounds, autopar.DataParallel())
    return (name, str(parts), *cells), worst


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where results differ."""
    args = arguments(list(argv) if argv is not None else None)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    results = [row(name, parts, args) for name in LAYOUTS for parts in args.parts]
    title = f"two convolutions and their gradients on {args.devices} devices"
    return print_rows(title, ["layout", "parts"], results, BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
