"""Every choice of what the axes of a mesh do in an operator group: each cuts a class of dimensions, or none."""

from __future__ import annotations

import itertools
from functools import lru_cache

PARTIAL = -2
"""The class of an axis over which an operator group of linear operators keeps its values partial."""

AxisChoice = tuple[tuple[str, int], ...]
"""(mesh axis, class) pairs; axes of one class stand in the order in which they cut it."""


@lru_cache(maxsize=1024)
def axis_choices(options: tuple[int, ...], axes: tuple[str, ...]) -> tuple[AxisChoice, ...]:
    """Every choice that gives each axis one of the options or none, with axes of one class in every order."""
    choices: dict[AxisChoice, None] = {}
    for order in itertools.permutations(axes):
        for chosen in itertools.product((None, *options), repeat=len(axes)):
            pairs = [(axis, cls) for axis, cls in zip(order, chosen, strict=True) if cls is not None]
            pairs.sort(key=lambda pair: (pair[1], 0 if pair[1] >= 0 else axes.index(pair[0])))
            choices[tuple(pairs)] = None
    return tuple(choices)
