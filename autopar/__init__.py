"""An ordinary JAX train step, planned for many devices and run."""

from autopar.api import ParallelFunction, parallelize
from autopar.cache import PlanCache
from autopar.custom_rules import register_rule
from autopar.errors import (
    ArgumentError,
    ClusterError,
    DeviceError,
    InternalError,
    OverBudgetError,
    PlanMismatchError,
    PlanningError,
    UnboundPlanError,
    UnsupportedError,
)
from autopar.measure import measure
from autopar.plan import Plan
from passes.by_hand import DataParallel, GPipe, Manual, Megatron, Pipeline, Zero
from passes.cluster import Cluster
from passes.intra_op import SolverOptions
from passes.pipeline import PipelinePlan
from passes.planner import Auto
from passes.progress import Progress

__all__ = [
    "ArgumentError",
    "Auto",
    "Cluster",
    "ClusterError",
    "DataParallel",
    "DeviceError",
    "GPipe",
    "InternalError",
    "Manual",
    "Megatron",
    "OverBudgetError",
    "ParallelFunction",
    "Pipeline",
    "PipelinePlan",
    "Plan",
    "PlanCache",
    "PlanMismatchError",
    "PlanningError",
    "Progress",
    "SolverOptions",
    "UnboundPlanError",
    "UnsupportedError",
    "Zero",
    "measure",
    "parallelize",
    "register_rule",
]
