"""The sharding rules, one per primitive: the dimensions of an operator that may be cut together, and what cutting
leaves to do.
"""

from passes.rules import (
    attention,
    convolution,
    effects,
    elementwise,
    indexing,
    libraries,
    linalg,
    pinned,
    random,
    reduction,
    shape,
    window,
)
from passes.rules.added_nodes import barrier, sum_of
from passes.rules.convolution import small_image_taps
from passes.rules.effects import makes_the_same
from passes.rules.pinned import boundaries_of, pinned_mesh
from passes.rules.registry import build, define, known_primitives, made_anywhere, replicate, rule_of, rules_of
from passes.rules.remembered import remembered
from passes.rules.sharding_rule import Assignment, Factor, ShardingRule, canonical, in_order
from passes.rules.unruled import WITHOUT_RULE

__all__ = [
    "WITHOUT_RULE",
    "Assignment",
    "Factor",
    "ShardingRule",
    "barrier",
    "boundaries_of",
    "build",
    "canonical",
    "define",
    "in_order",
    "known_primitives",
    "made_anywhere",
    "makes_the_same",
    "pinned_mesh",
    "remembered",
    "replicate",
    "rule_of",
    "rules_of",
    "small_image_taps",
    "sum_of",
]

RULES = (
    attention, convolution, effects, elementwise, indexing, libraries, linalg, pinned, random, reduction, shape, window,
)  # fmt: skip
"""The modules of rules, each of which registers its own when it is loaded."""
