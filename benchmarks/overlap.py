"""The speed-up of two stages that run at once in one process, as a share of what the closed form allows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from rich.table import Table

import autopar
from benchmarks.loaded_pipeline import load, mlp
from benchmarks.one_device import Pairs
from passes.text import quantities

SHARE = 0.95
"""The least share of the speed-up that the closed form allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Seconds of steps of two stages (`ours`) and of the same stages one after the other (`plain`), taken in turn.

    `control` is the speed-up of two independent programs that run on the same devices at once. `threads` are the cores
    that are busy while the stages run one after the other.
    """

    microbatches: int
    n_stages: int
    seconds: Pairs
    control: float
    threads: float

    @property
    def allowed(self) -> float:
        """The speed-up of the closed form: m p / (m + p - 1)."""
        m, p = self.microbatches, self.n_stages
        return m * p / (m + p - 1)

    @property
    def gained(self) -> float:
        """The speed-up measured."""
        return 1 / self.seconds.ratio

    @property
    def share(self) -> float:
        """The measured speed-up as a share of the allowed one."""
        return self.gained / self.allowed

    @property
    def best(self) -> float:
        """The share by the fastest step and the fastest serial one, which other work on the machine disturbs least."""
        return min(self.seconds.plain) / min(self.seconds.ours) / self.allowed

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the share."""
        low, high = self.seconds.interval()
        return 1 / high / self.allowed, 1 / low / self.allowed


def overlap(microbatches: int, rounds: int, *, layers: int = 48, width: int = 128, rows: int = 64) -> Overlap:
    """Two stages measured on a device each, with matrices so small that XLA multiplies them with one thread."""
    planner = autopar.Pipeline(stages=2, microbatches=microbatches, submeshes=(1, 1))
    loaded = load(mlp(layers, width, rows * microbatches), planner)
    together: list[float] = []
    serial: list[float] = []
    gains: list[float] = []
    spent = used = 0.0
    alone = _control(layers // 2, width, rows)
    for i in range(-2, rounds):
        step = loaded.seconds()
        start, start_used = time.perf_counter(), time.process_time()
        one_by_one = loaded.serial_seconds()
        if i >= 0:
            spent += time.perf_counter() - start
            used += time.process_time() - start_used
            together.append(step)
            serial.append(one_by_one)
            gains.append(alone())
    return Overlap(
        microbatches=microbatches,
        n_stages=2,
        seconds=Pairs(ours=tuple(together), plain=tuple(serial)),
        control=statistics.median(gains),
        threads=used / spent,
    )


def _control(layers: int, width: int, rows: int, repeats: int = 8) -> Callable[[], float]:
    """The speed-up of two programs on two devices at once over one after the other."""
    training = mlp(layers, width, rows)
    arguments = [jax.device_put((training.state, training.batch), device) for device in jax.devices()[:2]]
    step = jax.jit(training.step)
    jax.block_until_ready([step(*argument) for argument in arguments])

    def gain() -> float:
        start = time.perf_counter()
        for argument in arguments * repeats:
            jax.block_until_ready(step(*argument))
        between = time.perf_counter()
        jax.block_until_ready([step(*argument) for argument in arguments * repeats])
        return (between - start) / (time.perf_counter() - between)

    return gain


def overlap_table(rows: Sequence[Overlap]) -> Table:
    """Two stages at once, a number of microbatches a row."""
    title = "two stages of one device each, 1f1b, medians"
    table = Table(title=title, title_justify="left", padding=(0, 0))
    for heading in (
        "microbatches",
        "serial",
        "ideal",
        "step",
        "speed-up",
        "allowed",
        "share",
        "95 %",
        "best",
        "control",
        "threads",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        serial, step = (statistics.median(times) for times in (row.seconds.plain, row.seconds.ours))
        low, high = row.interval
        table.add_row(
            str(row.microbatches),
            quantities.seconds(serial),
            quantities.seconds(serial / row.allowed),
            quantities.seconds(step),
            f"{row.gained:.2f}",
            f"{row.allowed:.2f}",
            f"{100 * row.share:.1f} %",
            f"{100 * low:.0f}-{100 * high:.0f} %",
            f"{100 * row.best:.1f} %",
            f"{row.control:.2f}",
            f"{row.threads:.2f}",
            style="red" if row.share < SHARE else None,
        )
    return table
