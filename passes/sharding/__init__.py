"""The sharding spec of a value on a mesh, and reshardings: the cheapest chain of steps from one spec to another."""

from passes.sharding.resharding import Resharder, Step, placed
from passes.sharding.spec import ShardingSpec, parse_spec, replicated

__all__ = ["Resharder", "ShardingSpec", "Step", "parse_spec", "placed", "replicated"]
