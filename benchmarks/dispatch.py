"""The time that the host takes for each instruction of a pipeline, beside its bound."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from rich.table import Table

import autopar
from benchmarks.loaded_pipeline import load, mlp

YARDSTICK_NBYTES = 4096
"""Bytes of the array whose `jax.device_put` says how fast the host is at the time."""

BOUNDS = {(1, 1, 1, 1): (60e-6, 120e-6), (4, 2, 2): (220e-6, 330e-6)}
"""Seconds of the host for one Run and one Send, by the devices of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Median seconds of the host for the feed of a step and for each kind of instruction: in steps, and alone."""

    submeshes: tuple[int, ...]
    counts: dict[str, int]
    steps: dict[str, float]
    alone: dict[str, float]

    @property
    def misses(self) -> list[str]:
        """The bounds that are missed, each with its number."""
        pairs = zip(("Run", "Send"), BOUNDS.get(self.submeshes, ()), strict=False)
        return [
            f"{kind} on stages of {_sizes(self.submeshes)} devices: {self.steps[kind] * 1e6:.0f} us of the host, bound "
            f"{bound * 1e6:.0f} us"
            for kind, bound in pairs
            if self.steps[kind] > bound
        ]


def dispatch(submeshes: tuple[int, ...], rounds: int, microbatches: int = 8) -> Dispatch:
    """The host's seconds for instructions of a pipeline whose perceptron is too small to keep the host waiting."""
    planner = autopar.Pipeline(stages=len(submeshes), microbatches=microbatches, submeshes=submeshes)
    loaded = load(mlp(layers=8, width=32, rows=16 * microbatches), planner)
    seconds_of: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
    for i in range(-2, rounds):
        for alone, kinds in seconds_of.items():
            for kind, seconds in loaded.host_seconds(alone=alone).items():
                if i >= 0:
                    kinds.setdefault(kind, []).extend(seconds)
    medians = {alone: {k: statistics.median(v) for k, v in kinds.items()} for alone, kinds in seconds_of.items()}
    counts = Counter(type(instruction).__name__ for instruction in loaded.program.instructions)
    return Dispatch(submeshes=submeshes, counts=counts | {"feed": 1}, steps=medians[False], alone=medians[True])


def yardstick(repeats: int = 300) -> float:
    """Median seconds that one bare `jax.device_put` keeps the host of this machine at this time."""
    source, target = jax.devices()[:2]
    array = jax.device_put(jnp.zeros(YARDSTICK_NBYTES // 4, jnp.float32), source)
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        moved = jax.device_put(array, target)
        seconds.append(time.perf_counter() - start)
        moved.block_until_ready()
    return statistics.median(seconds)


def dispatch_table(rows: Sequence[Dispatch]) -> Table:
    """The host's microseconds for instructions, a kind a row; what misses its target in red."""
    table = Table(title="time of the host for an instruction, medians", title_justify="left")
    table.add_column("devices", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for heading in ("a step", "in a step", "alone", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        bounds: dict[str, float] = dict(zip(("Run", "Send"), BOUNDS.get(row.submeshes, ()), strict=False))
        for kind in ("Run", "Send", "Free", "feed"):
            bound = bounds.get(kind)
            verdict = "" if bound is None else "met" if row.steps[kind] <= bound else "missed"
            table.add_row(
                _sizes(row.submeshes) if kind == "Run" else "",
                kind,
                str(row.counts[kind]),
                f"{row.steps[kind] * 1e6:.0f} us",
                f"{row.alone[kind] * 1e6:.0f} us",
                "" if bound is None else f"{bound * 1e6:.0f} us, {verdict}",
                style="red" if verdict == "missed" else None,
            )
    return table


def _sizes(submeshes: Sequence[int]) -> str:
    return "+".join(map(str, submeshes))
