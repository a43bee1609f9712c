"""An ordinary JAX train step, planned for many devices and run."""

from autopar.api import ParallelFunction, parallelize
from autopar.custom_rules import register_rule
from autopar.errors import (
    ArgumentError,
    ClusterError,
    DeviceError,
    InternalError,
    PlanMismatchError,
    PlanningError,
    UnboundPlanError,
    UnsupportedError,
)
from autopar.measure import measure
from autopar.plan import Plan
from passes.by_hand import DataParallel, GPipe, Manual, Megatron, Pipeline, Zero
from passes.cluster import Cluster
from passes.pipeline import PipelinePlan
from passes.planner import Auto

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
    "ParallelFunction",
    "Pipeline",
    "PipelinePlan",
    "Plan",
    "PlanMismatchError",
    "PlanningError",
    "UnboundPlanError",
    "UnsupportedError",
    "Zero",
    "measure",
    "parallelize",
    "register_rule",
]
