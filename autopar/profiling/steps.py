"""Steps of a compiled function, one after another, each waited for and timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

LEAST, MOST = 3, 20
"""Numbers of steps that are timed, at least and at most: a median of fewer than three says nothing, and one of more
than twenty says little more.
"""

ENOUGH_SECONDS = 10.0
"""Seconds that timed steps may take together, judged by the first one, unless they are the fewest possible: long steps
vary less.
"""

WARM_UP = 2
"""Steps that are not timed: the first moves arguments to where they belong and may compile, the second finds them
there.
"""

Clock = Callable[[], float]


@dataclass(slots=True, kw_only=True)
class Stepper:
    """A function of flat arguments that is called again and again: the state that a step returns is the next one's
    argument.

    `pairs` are (output, input) positions. Arrays at `donated` are copied before the first step and, where no output
    replaces them, before every step, so that the caller's stay valid. Several processes take the same number of steps,
    by the seconds on which they have `agreed`.
    """

    run: Callable[[list[Any]], Any]
    leaves: list[Any]
    pairs: Sequence[tuple[int, int]]
    donated: Sequence[int]
    agreed: Callable[[float], float] = float
    given: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.given = list(self.leaves)
        self.leaves = [_copied(leaf) if i in self.donated else leaf for i, leaf in enumerate(self.leaves)]

    def step(self) -> Any:
        """The results of a step, which may not be computed yet."""
        results = self.run(list(self.leaves))
        outputs = jax.tree.leaves(results)
        following = {position: outputs[output] for output, position in self.pairs}
        self.leaves = [
            following[i] if i in following else _copied(self.given[i]) if i in self.donated else leaf
            for i, leaf in enumerate(self.leaves)
        ]
        return results


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of each of several steps until its results were there, and until the call had returned."""

    seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def typical(self) -> int:
        """The number of the step that took as long as the median, or the least longer."""
        return min(range(len(self.seconds)), key=lambda step: (self.seconds[step] < self.median, self.seconds[step]))

    @property
    def host_median(self) -> float:
        return statistics.median(self.host_seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and upper quartile."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def warm_up(stepper: Stepper) -> None:
    """Takes the steps that are not timed."""
    for _ in range(WARM_UP):
        jax.block_until_ready(stepper.step())


def timed(stepper: Stepper, clock: Clock = time.perf_counter, most: int = MOST) -> Steps:
    """The times of at most `most` steps, of fewer if the first one is long."""
    spent = [_time(stepper, clock)]
    first = stepper.agreed(spent[0][0])
    enough = math.ceil(ENOUGH_SECONDS / first) if first > 0 else most
    spent += [_time(stepper, clock) for _ in range(1, max(LEAST, min(most, enough)))]
    return Steps(seconds=tuple(done for done, _ in spent), host_seconds=tuple(issued for _, issued in spent))


def _time(stepper: Stepper, clock: Clock) -> tuple[float, float]:
    """(seconds until the results are there, seconds until the call has returned) of a step."""
    start = clock()
    results = stepper.step()
    issued = clock()
    jax.block_until_ready(results)
    return clock() - start, issued - start
