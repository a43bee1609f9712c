"""Planners: the search, textbook plans by hand and saved ones, and what to say where nothing fits."""

from passes.planners import infeasible
from passes.planners.auto import Auto, Planner
from passes.planners.infeasible import allowed, held
from passes.planners.manual import DataParallel, GPipe, Manual, Megatron, Pipeline, Zero

__all__ = [
    "Auto",
    "DataParallel",
    "GPipe",
    "Manual",
    "Megatron",
    "Pipeline",
    "Planner",
    "Zero",
    "allowed",
    "held",
    "infeasible",
]
