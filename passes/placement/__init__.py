"""Placements of all values of a program: the reshardings that they imply, in order, and the operators that are placed
together.
"""

from passes.placement.operator_groups import Grouping, OperatorGroup, group
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
    "Grouping",
    "Layout",
    "OperatorGroup",
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
