"""autopar plans an ordinary JAX train step for many devices, and runs it by the plan: see `parallelize`."""

from autopar import distributed, extensions
from autopar.api import ParallelFunction, parallelize
from autopar.cache import PlanCache
from autopar.checkpoint import CheckpointError, Checkpoints, Saved
from autopar.comparing import Comparison, compare
from autopar.errors import ArgumentError, DeviceError, DisagreementError, UnboundPlanError, UnsupportedError
from autopar.frontend import constrain
from autopar.lowering import register_rule
from autopar.plan import PipelinePlan, Plan
from autopar.profiling import Calibration, StepReport
from autopar.tools import Simulation, measure, simulate, topology
from autopar.training import StepLog
from passes.cluster import Cluster, DeviceSpec, HostGroup, HostSpec, Link, register_device
from passes.errors import ClusterError, InternalError, OverBudgetError, PlanMismatchError, PlanningError
from passes.inter_op import SCHEDULES, Schedule, Task
from passes.inter_op import register as register_schedule
from passes.planners import (
    Auto,
    DataParallel,
    GPipe,
    Manual,
    Megatron,
    Pipeline,
    Planned,
    Planner,
    PlanOptions,
    Zero,
)
from passes.progress import Progress
from passes.solver import SolverOptions
from passes.step import Step, Variant

__all__ = [
    "SCHEDULES",
    "ArgumentError",
    "Auto",
    "Calibration",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "Comparison",
    "DataParallel",
    "DeviceError",
    "DeviceSpec",
    "DisagreementError",
    "GPipe",
    "HostGroup",
    "HostSpec",
    "InternalError",
    "Link",
    "Manual",
    "Megatron",
    "OverBudgetError",
    "ParallelFunction",
    "Pipeline",
    "PipelinePlan",
    "Plan",
    "PlanCache",
    "PlanMismatchError",
    "PlanOptions",
    "Planned",
    "Planner",
    "PlanningError",
    "Progress",
    "Saved",
    "Schedule",
    "Simulation",
    "SolverOptions",
    "Step",
    "StepLog",
    "StepReport",
    "Task",
    "UnboundPlanError",
    "UnsupportedError",
    "Variant",
    "Zero",
    "compare",
    "constrain",
    "distributed",
    "measure",
    "parallelize",
    "register_device",
    "register_rule",
    "register_schedule",
    "simulate",
    "topology",
]

extensions.load()
