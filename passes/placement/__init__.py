"""Placements of all values of a program: operators that are placed together, and the reshardings that
placements imply.
"""

from passes.placement.background import Background, products
from passes.placement.operator_groups import Grouping, OperatorGroup, group
from passes.placement.reshardings import (
    Layout,
    Occurrence,
    Pack,
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
    "Background",
    "Grouping",
    "Layout",
    "Occurrence",
    "OperatorGroup",
    "Pack",
    "Placement",
    "Resharding",
    "ReshardingPlan",
    "collectives",
    "group",
    "is_free",
    "occurrences",
    "products",
    "resharding_plan",
    "shared",
    "weights",
]
