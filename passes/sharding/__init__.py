"""Sharding specs of values on a mesh, and reshardings: the cheapest chain of steps from one spec to another."""

from passes.sharding.behind import PACKED_NBYTES, Behind
from passes.sharding.on_mesh import boundaries, is_placed, spec_on
from passes.sharding.resharding import Resharder, Step, placed
from passes.sharding.spec import ANY, REDUCTIONS, ShardingSpec, parse_spec, replicated

__all__ = [
    "ANY",
    "PACKED_NBYTES",
    "REDUCTIONS",
    "Behind",
    "Resharder",
    "ShardingSpec",
    "Step",
    "boundaries",
    "is_placed",
    "parse_spec",
    "placed",
    "replicated",
    "spec_on",
]
