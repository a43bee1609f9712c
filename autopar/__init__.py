"""An ordinary JAX train step, planned for many devices and run."""

from autopar.api import ParallelFunction, parallelize
from autopar.cache import PlanCache
from autopar.errors import ArgumentError, DeviceError, UnboundPlanError, UnsupportedError
from autopar.lowering import register_rule
from autopar.plan import Plan
from autopar.tools import measure
from passes.cluster import Cluster
from passes.errors import ClusterError, InternalError, OverBudgetError, PlanMismatchError, PlanningError
from passes.plan import PipelinePlan
from passes.planners import Auto, DataParallel, GPipe, Manual, Megatron, Pipeline, Zero
from passes.progress import Progress
from passes.solver import SolverOptions

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
