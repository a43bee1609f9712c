"""Small gradients reduced one by one, and as one array: `python -m benchmarks.buckets --help`.

XLA's CPU compiler makes one all-reduce of many, but runs it array by array, so programs pack small ones into one there.
Here a program on virtual CPU devices reduces so many gradients by a `psum` each, or lays them side by side, reduces
that and cuts it apart: how many all-reduces XLA makes of either, whether results are equal bit by bit, and how long
either takes, run in turn. Up to which size that pays is `PACKED_NBYTES` of `passes/sharding/behind.py`.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.table import Table

from benchmarks.console import stdout
from benchmarks.lists import whole_numbers

Reduce = Callable[..., tuple[jax.Array, ...]]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.buckets",
        description="Reduce small gradients over virtual CPU devices one by one, and side by side as one array.",
    )
    shown = "(default: %(default)s)"
    parser.add_argument("--devices", type=int, default=8, metavar="N", help=f"virtual CPUs {shown}")
    parser.add_argument("--gradients", type=int, default=48, metavar="N", help=f"tensors that are reduced {shown}")
    parser.add_argument(
        "--elements", type=whole_numbers, default=(64, 1024, 16384, 131072), metavar="A,B", help=f"of each {shown}"
    )
    parser.add_argument("--runs", type=int, default=40, metavar="N", help=f"pairs of runs, in turn {shown}")
    return parser.parse_args(argv)


def one_by_one(*gradients: jax.Array) -> tuple[jax.Array, ...]:
    """Each gradient added up over the devices, by itself."""
    return tuple(lax.psum(g, "x") for g in gradients)


def side_by_side(*gradients: jax.Array) -> tuple[jax.Array, ...]:
    """The same, as one array that is cut apart again."""
    ends = np.cumsum([g.size for g in gradients])[:-1].tolist()
    total = lax.psum(jnp.concatenate([g.ravel() for g in gradients]), "x")
    return tuple(part.reshape(g.shape) for part, g in zip(jnp.split(total, ends), gradients, strict=True))


def compiled(reduce: Reduce, gradients: Sequence[jax.Array], mesh: jax.sharding.Mesh) -> Any:
    """A program that computes gradients on each device, of its own rows, and reduces them."""

    def step(*rows: jax.Array) -> tuple[jax.Array, ...]:
        return reduce(*(jnp.tanh(r[0]) for r in rows))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P())
    return jax.jit(mapped).lower(*gradients).compile()


def n_all_reduces(program: Any) -> int:
    """The number of all-reduces in a compiled program."""
    return len(re.findall(r"= \S.*? all-reduce(?:-start)?\(", program.as_text()))


def seconds(program: Any, gradients: Sequence[jax.Array]) -> float:
    """Seconds of one run."""
    began = time.perf_counter()
    jax.block_until_ready(program(*gradients))
    return time.perf_counter() - began


def row(elements: int, args: argparse.Namespace, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The cells of gradients of one size: all-reduces, equality, median times and the median ratio of pairs."""
    draw = np.random.default_rng(0).normal
    lay = partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, P("x")))
    gradients = [lay(draw(size=(args.devices, elements)).astype("float32")) for _ in range(args.gradients)]
    apart, together = (compiled(reduce, gradients, mesh) for reduce in (one_by_one, side_by_side))
    equal = all(map(np.array_equal, apart(*gradients), together(*gradients)))
    pairs = [(seconds(apart, gradients), seconds(together, gradients)) for _ in range(args.runs)]
    medians = [statistics.median(pair[i] for pair in pairs) for i in (0, 1)]
    ratio = statistics.median(after / before for before, after in pairs)
    counts = (n_all_reduces(apart), n_all_reduces(together))
    return (
        f"{elements:,}",
        *map(str, counts),
        "yes" if equal else "no",
        *(f"{median * 1e3:.2f} ms" for median in medians),
        f"{ratio:.2f}",
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 where results differ."""
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((args.devices,), ("x",))
    shown = Table(title=f"{args.gradients} gradients on {args.devices} devices", title_justify="left")
    for name in ("elements", "all-reduces", "as one array", "equal", "time one by one", "as one array", "ratio"):
        shown.add_column(name, justify="right")
    rows = [row(elements, args, mesh) for elements in args.elements]
    for cells in rows:
        shown.add_row(*cells)
    stdout().print(shown)
    return any(cells[3] == "no" for cells in rows)


if __name__ == "__main__":
    raise SystemExit(main())
