"""Pipeline schedules, their simulation, and the search for stages by dynamic programming over a table of stage costs.
It knows neither graphs nor meshes.
"""

from passes.inter_op import partitions
from passes.inter_op.choices import Candidate, LowerBound, Partition, Submesh, submeshes
from passes.inter_op.makespan import NamedSchedule
from passes.inter_op.schedule_registry import SCHEDULES, build, is_chunked, register, splits_backward
from passes.inter_op.schedules import Schedule, Task
from passes.inter_op.simulator import StageCost, Timeline, Transfer, peaks, simulate

__all__ = [
    "SCHEDULES",
    "Candidate",
    "LowerBound",
    "NamedSchedule",
    "Partition",
    "Schedule",
    "StageCost",
    "Submesh",
    "Task",
    "Timeline",
    "Transfer",
    "build",
    "is_chunked",
    "partitions",
    "peaks",
    "register",
    "simulate",
    "splits_backward",
    "submeshes",
]
