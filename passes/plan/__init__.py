"""Plans as values: all that was chosen for one mesh or for the stages of a pipeline, as text, as JSON, compared and
checked.
"""

from passes.plan import json, text
from passes.plan.estimate import Estimate
from passes.plan.parts import (
    INTERRUPTED,
    LATE,
    POINTS,
    STAGE,
    Alternative,
    LayerCost,
    MemoryReport,
    Operator,
    Solution,
    operators,
)
from passes.plan.pipeline import PipelinePlan, load_plan, plan_from_json
from passes.plan.plan import AnyPlan, Plan
from passes.plan.reading import SCHEMA

__all__ = [
    "INTERRUPTED",
    "LATE",
    "POINTS",
    "SCHEMA",
    "STAGE",
    "Alternative",
    "AnyPlan",
    "Estimate",
    "LayerCost",
    "MemoryReport",
    "Operator",
    "PipelinePlan",
    "Plan",
    "Solution",
    "json",
    "load_plan",
    "operators",
    "plan_from_json",
    "text",
]
