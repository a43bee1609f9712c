"""Flat arguments in the form that a jitted program takes: a list for each run of neighbours that are all donated, or
all not.

JAX's fast path makes a pytree of its own for each argument: for a thousand of them that costs half as much as the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Groups:
    """Runs of flat arguments, as consecutive `slices`; the runs at `donated` are given away."""

    slices: tuple[slice, ...]
    donated: tuple[int, ...]

    def __call__(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """The leaves, as a list for each group."""
        return [list(leaves[each]) for each in self.slices]


def grouped(donated: Iterable[bool]) -> Groups:
    """The groups of flat arguments of which these are donated."""
    slices: list[slice] = []
    given: list[int] = []
    start = 0
    for number, (is_donated, flags) in enumerate(groupby(donated)):
        stop = start + len(list(flags))
        slices.append(slice(start, stop))
        if is_donated:
            given.append(number)
        start = stop
    return Groups(tuple(slices), tuple(given))
