"""Placements of all values of a program: the reshardings that they imply, in order, and the operators that are placed
together.
"""

from passes.placement.bundles import Bundle, Grouping, group
from passes.placement.reshardings import (
    Layout,
    Placement,
    Resharding,
    ReshardingPlan,
    collectives,
    is_free,
    occurrences,
    resharding_plan,
    shared,
    weights,
)

__all__ = [
    "Bundle",
    "Grouping",
    "Layout",
    "Placement",
    "Resharding",
    "ReshardingPlan",
    "collectives",
    "group",
    "is_free",
    "occurrences",
    "resharding_plan",
    "shared",
    "weights",
]
