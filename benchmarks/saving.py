"""The time that saving a checkpoint adds to steps: `python -m benchmarks.saving --help`.

It is that of the step which begins with the save, and of the next steps, during which the checkpoint is written. Steps
are taken in turns of four, and every other turn begins with a save. Each such turn is compared with the one after it,
so that what else the machine does falls on both alike. Bound: the step with the save takes 5 % longer, or exit status
1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

BOUND = 0.05
"""The share of a step by which a save may lengthen it."""

TURN = 4
"""Steps of a turn; what the first one saves is written during the others, as far as they leave time."""

INTERVAL = 100
"""Steps between saves for which the printed share of time is: minutes of a training that is worth saving."""


def step(state: Any, batch: jax.Array) -> Any:
    """One step of gradient descent with momentum on square layers."""

    def loss(params: Any) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params, moments = state
    value, gradient = jax.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), value


def main() -> int:
    """Prints how much longer steps take; 1 where the bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.saving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns with a save (default: %(default)s)")
    parser.add_argument(
        "--layers", type=int, default=12, help="of 4 MiB each, with as much momentum (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=1024, help="of a batch: a longer step (default: %(default)s)")
    options = parser.parse_args()
    width = 1024
    parallel = autopar.parallelize(step, donate_argnums=0)
    params: list[Any] = [np.eye(width, dtype=np.float32) + number for number in range(options.layers)]
    batch: Any = np.ones((options.rows, width), np.float32)
    state: Any = (params, [np.zeros_like(p) for p in params])
    for _ in range(2):
        state, loss = parallel(state, batch)
    turns: list[list[float]] = []
    calls: list[float] = []
    behind: list[float] = []
    with tempfile.TemporaryDirectory() as folder, autopar.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(0, state)  # the first one sets Orbax up
        checkpoints.wait()
        for number in range(2 * options.rounds):
            turn: list[float] = []
            for at in range(TURN):
                start = time.perf_counter()
                if number % 2 == 0 and at == 0:
                    checkpoints.save(number + 1, state, position=number)
                    calls.append(time.perf_counter() - start)
                state, loss = parallel(state, batch)
                jax.block_until_ready(loss)
                turn.append(time.perf_counter() - start)
            turns.append(turn)
            start = time.perf_counter()
            checkpoints.wait()
            if number % 2 == 0:
                behind.append(time.perf_counter() - start)
    return _verdict(sum(leaf.nbytes for leaf in jax.tree.leaves(state)), turns, calls, behind)


def _verdict(nbytes: int, turns: list[list[float]], calls: list[float], behind: list[float]) -> int:
    """The exit status; prints what was measured in turns with and without a save, by turns."""
    usual = [statistics.median(turn) for turn in turns[1::2]]
    saved = [turn[0] / plain - 1 for turn, plain in zip(turns[::2], usual, strict=True)]
    during = [statistics.median(turn[1:]) / plain - 1 for turn, plain in zip(turns[::2], usual, strict=True)]
    # What a save costs in all: what it adds to its turn, and what is waited for if the next one came then.
    added = [sum(turn) + wait - TURN * plain for turn, wait, plain in zip(turns[::2], behind, usual, strict=True)]
    step, call, waiting, cost = map(statistics.median, (usual, calls, behind, added))
    first, later = statistics.median(saved), statistics.median(during)
    print(
        f"state {nbytes >> 20} MiB, step {step:.3f} s, save() returns after {call:.3f} s ({100 * (call / step):.1f} %)"
    )
    print(
        f"a step with its save takes {100 * first:+.1f} %, "
        f"the {TURN - 1} behind it {100 * later:+.1f} %; then {waiting:.3f} s to wait"
    )
    print(
        f"a save costs {cost:.3f} s in all, {100 * (cost / step / INTERVAL):.2f} % "
        f"where every {INTERVAL}th step is saved",
        flush=True,
    )
    return 0 if first < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
