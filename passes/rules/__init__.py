"""One sharding rule per primitive; the only place in planning that mentions primitives."""

from passes.rules import convolution, effects, elementwise, indexing, linalg, pinned, random, reduction, shape, window
from passes.rules.effects import makes_the_same
from passes.rules.pinned import pinned_mesh
from passes.rules.registry import (
    Assignment,
    Factor,
    ShardingRule,
    canonical,
    define,
    known_primitives,
    replicate,
    rule,
    rule_of,
)
from passes.rules.unruled import WITHOUT_RULE

__all__ = [
    "WITHOUT_RULE",
    "Assignment",
    "Factor",
    "ShardingRule",
    "canonical",
    "convolution",
    "define",
    "effects",
    "elementwise",
    "indexing",
    "known_primitives",
    "linalg",
    "makes_the_same",
    "pinned",
    "pinned_mesh",
    "random",
    "reduction",
    "replicate",
    "rule",
    "rule_of",
    "shape",
    "window",
]
