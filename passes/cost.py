"""Seconds and bytes of operators under a sharding: a roofline of matrix rate and memory rate over a launch floor.

Reference: Williams, Waterman and Patterson, "Roofline" (CACM 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.cluster import DeviceSpec
from passes.mesh import Mesh
from passes.rules import Assignment, ShardingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one device does for a fused group of operators: `flops` of `dtype`, `nbytes` read and written."""

    flops: float
    nbytes: float
    dtype: str

    def seconds(self, device: DeviceSpec) -> float:
        """The larger of compute and memory time, plus one launch."""
        compute = self.flops / device.matmul_flops_per_second(self.dtype)
        return max(compute, self.nbytes / device.memory_bytes_per_second) + device.launch_seconds


def local_flops(rule: ShardingRule, assignment: Assignment, mesh: Mesh) -> float:
    """The flops of one device; only factors that stand on a dimension divide the work."""
    parts = 1
    for axis, factor in assignment:
        if rule.factors[factor].size:
            parts *= mesh.axis_size(axis)
    return rule.flops / parts
