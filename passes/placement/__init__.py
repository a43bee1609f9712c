"""Placements of all values of a program: the reshardings that they imply, in order, and the operators that are placed
together.
"""

from passes.placement.bundles import Bundle, Grouping, group
from passes.placement.reshardings import (
    Layout,
    Move,
    Placement,
    Schedule,
    collectives,
    due,
    is_free,
    moves,
    shared,
    weights,
)

__all__ = [
    "Bundle",
    "Grouping",
    "Layout",
    "Move",
    "Placement",
    "Schedule",
    "collectives",
    "due",
    "group",
    "is_free",
    "moves",
    "shared",
    "weights",
]
