"""One sharding rule per primitive; the only place in planning that mentions primitives."""

from passes.rules import elementwise, indexing, linalg, random, reduction, shape
from passes.rules.registry import (
    Assignment,
    Factor,
    ShardingRule,
    canonical,
    known_primitives,
    replicate,
    rule,
    rule_of,
)

__all__ = [
    "Assignment",
    "Factor",
    "ShardingRule",
    "canonical",
    "elementwise",
    "indexing",
    "known_primitives",
    "linalg",
    "random",
    "reduction",
    "replicate",
    "rule",
    "rule_of",
    "shape",
]
