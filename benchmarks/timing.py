"""Step times of several programs, measured in turn so that a drift of the machine's speed falls on all alike."""

from collections.abc import Callable, Mapping

from benchmarks.one_device import Pairs, Runner

WARM_UP = 2

TURN = 2
"""Steps of a runner in a round, of which the last is timed: the first finds the arrays of other programs in the caches,
as no step of a training does but its very first."""

Seconds = dict[str, tuple[float, ...]]


def interleaved(
    runners: Mapping[str, Runner], rounds: int, *, warm_up: int = WARM_UP, tick: Callable[[], None] = lambda: None
) -> Seconds:
    """The seconds of one step of each runner in each round [rounds], after `warm_up` rounds that are not counted.

    In a round each runner takes `TURN` steps, of which the last is timed; every other round goes through the runners
    backwards. `tick` is called after each round.
    """
    names = list(runners)
    seconds_of: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-warm_up, rounds):
        for name in names if i % 2 == 0 else reversed(names):
            *_, seconds = (runners[name].seconds() for _ in range(TURN))
            if i >= 0:
                seconds_of[name].append(seconds)
        tick()
    return {name: tuple(seconds) for name, seconds in seconds_of.items()}


def ratio(seconds: Seconds, ours: str, theirs: str) -> tuple[float, tuple[float, float]]:
    """The median over the rounds of `ours` divided by `theirs`, and its 95 % bootstrap interval."""
    pairs = Pairs(ours=seconds[ours], plain=seconds[theirs])
    return pairs.ratio, pairs.interval()
