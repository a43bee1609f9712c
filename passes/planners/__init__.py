"""Planners: the automatic search, hand-made plans, and saved plans; and the errors where nothing fits."""

from passes.planners import infeasible
from passes.planners.auto import Auto
from passes.planners.following import FollowingStages, counterparts
from passes.planners.infeasible import allowed, largest_holders
from passes.planners.manual import DataParallel, GPipe, Manual, Megatron, Pipeline, Zero
from passes.planners.placement_reasons import reasons
from passes.planners.planner import Planned, Planner, PlanOptions, limit_nbytes, named

__all__ = [
    "Auto",
    "DataParallel",
    "FollowingStages",
    "GPipe",
    "Manual",
    "Megatron",
    "Pipeline",
    "PlanOptions",
    "Planned",
    "Planner",
    "Zero",
    "allowed",
    "counterparts",
    "infeasible",
    "largest_holders",
    "limit_nbytes",
    "named",
    "reasons",
]
