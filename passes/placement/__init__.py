"""Placements of all values of a program: operators that are placed together, the reshardings that placements imply,
and programs whose rows may be placed in any order.
"""

from passes.placement.background import Background, products
from passes.placement.operator_group import OperatorGroup
from passes.placement.operator_groups import Grouping, group
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
from passes.placement.row_order import rows_in_any_order

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
    "rows_in_any_order",
    "shared",
    "weights",
]
