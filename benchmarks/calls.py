"""The time that a call with many arrays takes on the host, beside `jax.jit`'s: `python -m benchmarks.calls --help`.

Both run the same step under the same shardings. Measured is the processor time of the calling thread until the call
returns, which other work on the machine does not change.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

import autopar
from benchmarks.console import stdout
from benchmarks.one_device import Pairs, Runner, paired

BOUND = 1.2
"""The largest median ratio of the host's time of a call with a thousand arrays to that of `jax.jit`."""

DEVICES = (1, 8)


class Host(Runner):
    """A runner whose seconds are those that the calling thread computes until a call returns, not those of the step."""

    def seconds(self) -> float:
        """Processor seconds of this thread until a call returns."""
        start = time.thread_time()
        results = self.step(self.state, *self.batch)
        elapsed = time.thread_time() - start
        jax.block_until_ready(results)
        self.state = results[0]
        return elapsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The measured calls of a step; its second `argument` is a "number" or an "array", its state is donated or kept."""

    devices: int
    argument: str
    donated: bool
    pairs: Pairs

    @property
    def record(self) -> dict[str, Any]:
        """The row as plain data."""
        ours, plain = (statistics.median(side) for side in (self.pairs.ours, self.pairs.plain))
        row = {"devices": self.devices, "argument": self.argument, "donated": self.donated}
        return row | {"seconds": ours, "jit": plain, "ratio": self.pairs.ratio, "interval": self.pairs.interval()}


def add(state: Any, x: Any) -> tuple[Any, Any]:
    """A step that does next to nothing with each array."""
    return jax.tree.map(lambda a: a + x, state), x * 2


def measured(devices: int, leaves: int, argument: str, rounds: int, *, donated: bool) -> Call:
    """Calls of autopar and of `jax.jit`, in turn, on so many devices."""
    state = {f"p{i}": jnp.zeros((8,)) for i in range(leaves)}
    x = 1.0 if argument == "number" else jnp.ones(())
    given = (0,) if donated else ()
    step = autopar.parallelize(
        add, devices=jax.devices()[:devices], planner=autopar.Auto(max_axes=1), donate_argnums=given
    )
    placed: dict[str, Any] = {}
    if devices > 1:
        compiled = step.lower(state, x).compile()
        state = jax.device_put(state, compiled.input_shardings[0][0])
        placed = {"in_shardings": compiled.input_shardings[0], "out_shardings": compiled.output_shardings}
    plain: Callable[..., Any] = jax.jit(lambda *args: add(*args), **placed, donate_argnums=given)
    pairs = paired(Host(step, state, x), Host(plain, state, x), rounds, warm_up=5)
    return Call(devices=devices, argument=argument, donated=donated, pairs=pairs)


def table(calls: Sequence[Call], leaves: int) -> Table:
    """The table of calls, a case a row."""
    title = f"host's time of a call with {leaves:,} arrays, medians of pairs measured in turn"
    headings = ("devices", "other argument", "state", "autopar", "jax.jit", "ratio", "95 % interval")
    result = Table(*headings, title=title, title_justify="left")
    for call in calls:
        row = call.record
        low, high = row["interval"]
        result.add_row(
            str(call.devices),
            call.argument,
            "donated" if call.donated else "kept",
            *(f"{row[side] * 1e3:.2f} ms" for side in ("seconds", "jit")),
            f"{row['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            style="red" if row["ratio"] > BOUND else None,
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 if the bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calls",
        description="Compare the host's time of calls of autopar.parallelize and of jax.jit on 1 and 8 CPU devices. "
        f"Exits with 1 if a median ratio is above {BOUND}.",
        epilog="example: python -m benchmarks.calls --rounds 200",
    )
    parser.add_argument("--leaves", default=1000, type=int, metavar="N", help="arrays (default: %(default)s)")
    parser.add_argument("--rounds", default=100, type=int, metavar="N", help="measured pairs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    jax.config.update("jax_platforms", "cpu")
    console = stdout()
    cases = [(n, argument, donated) for n in DEVICES for argument in ("number", "array") for donated in (False, True)]
    calls: list[Call] = []
    for n, argument, donated in cases:
        with console.status(f"{n} devices, {argument}"):
            calls.append(measured(n, args.leaves, argument, args.rounds, donated=donated))
    misses = [f"{c.devices} devices, {c.argument}: {c.pairs.ratio:.3f}" for c in calls if c.pairs.ratio > BOUND]
    if args.json:
        print(json.dumps({"bound": BOUND, "calls": [call.record for call in calls], "misses": misses}, indent=1))
        return bool(misses)
    console.print(table(calls, args.leaves))
    for miss in misses:
        console.print(f"MISSED {miss}, bound {BOUND}", style="red")
    return bool(misses)


if __name__ == "__main__":
    raise SystemExit(main())
