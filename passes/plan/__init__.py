"""Plans as values: what was chosen for one mesh or for the stages of a pipeline, as text, JSON and a difference, and
whether it is legal.
"""

from passes.plan import json, text
from passes.plan.estimate import Estimate
from passes.plan.face import AnyPlan
from passes.plan.parts import INTERRUPTED, LATE, POINTS, MemoryReport, Operator, Solution, operators
from passes.plan.pipeline import PipelinePlan, load_plan
from passes.plan.pipeline_diff import differences
from passes.plan.plan import SCHEMA, Plan

__all__ = [
    "INTERRUPTED",
    "LATE",
    "POINTS",
    "SCHEMA",
    "AnyPlan",
    "Estimate",
    "MemoryReport",
    "Operator",
    "PipelinePlan",
    "Plan",
    "Solution",
    "differences",
    "json",
    "load_plan",
    "operators",
    "text",
]
