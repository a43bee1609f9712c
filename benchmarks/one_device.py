"""The cost of autopar where there is nothing to parallelise: `python -m benchmarks.one_device --help`.

On one CPU device the planned step and `jax.jit` run the same computation, so any difference is overhead: other code
that XLA makes of it, state that is copied where it could be updated in place, or Python around each call.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import optax
from rich.table import Table

import autopar
from benchmarks.console import stdout
from models import gpt

BOUND = 1.01
"""The largest median ratio of step times."""

RESAMPLES = 10_000
"""Draws of the bootstrap."""

TRIVIAL_CALLS = 200
"""Calls of a step that does next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Seconds of steps of autopar and of `jax.jit`, measured in turn; equally many of each."""

    ours: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """autopar's seconds divided by jit's, for each pair of neighbouring steps."""
        return [a / b for a, b in zip(self.ours, self.plain, strict=True)]

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the median ratio."""
        drawn = np.random.default_rng(0).choice(self.ratios, size=(RESAMPLES, len(self.ratios)))
        low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
        return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a compiled step: `state` that is donated, of it `aliased` by outputs, and temporaries.

    `reused` of `buffers` state buffers were found at the same address after a step.
    """

    state: int
    aliased: int
    temporaries: int
    reused: int
    buffers: int


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_device",
        description="Compare GPT steps of autopar.parallelize and of jax.jit on one CPU device, both with the state "
        f"donated. Exits with 1 if the median ratio of paired step times is above {BOUND}, or if state is copied that "
        "jax.jit updates in place.",
        epilog="example: python -m benchmarks.one_device --pairs 200",
    )
    parser.add_argument("--batch", default=4, type=int, metavar="N", help="sequences a step (default: %(default)s)")
    parser.add_argument(
        "--pairs", default=100, type=int, metavar="N", help="measured pairs of steps (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up", default=10, type=int, metavar="N", help="steps before measuring (default: %(default)s)"
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="measure jax.jit against a second jax.jit of the same step, to see what this machine's noise amounts to",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(argv)


def make_step(config: gpt.Config, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """An ordinary train step (state, batch) -> (state, loss); state is (parameters, optimizer's state)."""

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(lambda params: gpt.loss(config, params, batch))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return train_step


class Runner:
    """A step function with its own state, which every call replaces."""

    def __init__(self, step: Callable[..., Any], state: Any, *batch: Any) -> None:
        self.step, self.batch = step, batch
        self.state = jax.tree.map(lambda x: x.copy(), state)

    def seconds(self) -> float:
        """Seconds of one step, to its last output."""
        start = time.perf_counter()
        results = self.step(self.state, *self.batch)
        jax.block_until_ready(results)
        elapsed = time.perf_counter() - start
        self.state = results[0]
        return elapsed

    def buffers_reused(self) -> tuple[int, int]:
        """(state buffers that are where some state buffer was a step before, state buffers)."""
        addresses_before = self._addresses()
        self.seconds()
        addresses_after = self._addresses()
        return len(addresses_before & addresses_after), len(addresses_after)

    def _addresses(self) -> set[int]:
        return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(self.state)}


def paired(ours: Runner, plain: Runner, pairs: int, warm_up: int) -> Pairs:
    """The seconds of so many pairs of steps, after `warm_up` of each that are not counted.

    They run in the order A B B A, so that a drift of the machine's speed falls on both alike.
    """
    for _ in range(warm_up):
        ours.seconds()
        plain.seconds()
    a: list[float] = []
    b: list[float] = []
    for i in range(pairs):
        first, second = (ours, plain) if i % 2 == 0 else (plain, ours)
        times = first.seconds(), second.seconds()
        a.append(times[i % 2])
        b.append(times[1 - i % 2])
    return Pairs(ours=tuple(a), plain=tuple(b))


def memory(runner: Runner, compiled: Any) -> Memory:
    """The bytes that XLA reports of the compiled step, and how many state buffers a step of the runner reuses."""
    analysis = compiled.memory_analysis()
    reused, buffers = runner.buffers_reused()
    return Memory(
        state=sum(x.nbytes for x in jax.tree.leaves(runner.state)),
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        reused=reused,
        buffers=buffers,
    )


def dispatch(state: Any, batch: Any, wrap: Callable[..., Any]) -> Runner:
    """A step of the same arguments that computes next to nothing, so that its seconds are those of a call alone."""

    def touch(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        return state, batch["inputs"][0, 0] + 1

    return Runner(wrap(touch), state, batch)


def milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds, with three digits below a second."""
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def table(steps: Pairs, calls: Pairs, ours: Memory, plain: Memory, name: str) -> Table:
    """autopar beside jit, one quantity a row."""
    table = Table("", name, "jax.jit", title="one CPU device, state donated", title_justify="left")
    for title, pairs in (("step, median", steps), ("call alone, median", calls)):
        table.add_row(title, *(milliseconds(statistics.median(times)) for times in (pairs.ours, pairs.plain)))
    for title, get in (
        ("state, donated", lambda m: f"{m.state:,} B"),
        ("aliased by outputs", lambda m: f"{m.aliased:,} B"),
        ("temporaries", lambda m: f"{m.temporaries:,} B"),
        ("buffers in place", lambda m: f"{m.reused} of {m.buffers} buffers"),
    ):
        table.add_row(title, get(ours), get(plain))
    return table


def missed(steps: Pairs, ours: Memory, plain: Memory) -> list[str]:
    """The bounds that are missed, in words with both numbers."""
    misses: list[str] = []
    if steps.ratio > BOUND:
        misses.append(f"median ratio of step times {steps.ratio:.4f}, bound {BOUND}")
    if ours.aliased < plain.aliased:
        misses.append(f"aliased state {ours.aliased:,} B, with jax.jit {plain.aliased:,} B")
    if ours.reused < plain.reused:
        misses.append(f"{ours.reused} state buffers stay in place, with jax.jit {plain.reused}")
    return misses


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; 1 if a bound is missed."""
    args = arguments(argv)
    console = stdout()
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_platforms", "cpu")
    config = gpt.Config.preset("tiny")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = jax.jit(lambda key: gpt.init(config, key))(jax.random.key(0))
    state = (params, optimizer.init(params))
    batch = gpt.example_batch(config, args.batch, jax.random.key(1))
    step = make_step(config, optimizer)

    def jit(fun: Callable[..., Any]) -> Any:
        return jax.jit(lambda *args: fun(*args), donate_argnums=(0,))  # a new function each time, hence a new program

    def parallelize(fun: Callable[..., Any]) -> Any:
        return jit(fun) if args.control else autopar.parallelize(fun, donate_argnums=(0,))

    ours_step, plain_step = parallelize(step), jit(step)
    ours, plain = Runner(ours_step, state, batch), Runner(plain_step, state, batch)
    with console.status("measuring"):
        steps = paired(ours, plain, args.pairs, args.warm_up)
        calls = paired(
            dispatch(state, batch, parallelize), dispatch(state, batch, jit), TRIVIAL_CALLS, warm_up=args.warm_up
        )
        ours_memory = memory(ours, ours_step.lower(state, batch).compile())
        plain_memory = memory(plain, plain_step.lower(state, batch).compile())
    low, high = steps.interval()
    misses = missed(steps, ours_memory, plain_memory)
    leaves = len(jax.tree.leaves((state, batch)))
    if args.json:
        record = {
            "ratio": steps.ratio,
            "interval": (low, high),
            "bound": BOUND,
            "step_seconds": asdict(steps),
            "call_seconds": asdict(calls),
            "memory": {"ours": asdict(ours_memory), "jit": asdict(plain_memory)},
            "leaves": leaves,
            "control": args.control,
            "misses": misses,
        }
        print(json.dumps(record, indent=1))
        return bool(misses)
    console.print(table(steps, calls, ours_memory, plain_memory, "jax.jit again" if args.control else "autopar"))
    console.print(f"GPT tiny, batch {args.batch}, {leaves} arrays a call; {args.pairs} pairs of steps, A B B A")
    console.print(
        f"ratio of step times: median {steps.ratio:.4f}, 95 % interval {low:.4f} to {high:.4f} (bootstrap), "
        f"quartiles {' to '.join(f'{q:.3f}' for q in np.quantile(steps.ratios, (0.25, 0.75)))}; bound {BOUND}"
    )
    extra = statistics.median(a - b for a, b in zip(calls.ours, calls.plain, strict=True))
    console.print(
        f"call alone: {extra * 1e6:+.0f} us against jax.jit, "
        f"{100 * (extra / statistics.median(steps.plain)):+.2f} % of a step"
    )
    for miss in misses:
        console.print(f"MISSED {miss}", style="red", soft_wrap=True)
    return bool(misses)


if __name__ == "__main__":
    raise SystemExit(main())
