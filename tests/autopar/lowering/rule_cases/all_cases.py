"""At least one use of every primitive that has a sharding rule, as ordinary JAX; add one with each rule."""

from __future__ import annotations

from tests.autopar.lowering.rule_cases import (
    attention,
    convolution,
    elementwise,
    indexing,
    libraries,
    linalg,
    random,
    reduction,
    scatters,
    shape,
)
from tests.autopar.lowering.rule_cases.case import Case

ABSENT = elementwise.NEWER | {
    **dict.fromkeys(
        ("debug_callback", "debug_print", "io_callback", "pure_callback"),
        "it runs once, on whole operands: tests/autopar/lowering/test_effects.py",
    ),
    "platform_index": "it has no operands, and means something in a compiled program alone",
    "mulhi": "XLA's CPU compiler refuses it for more than one device",
    "shard_map": "its pieces are the user's, not the rule's",
    "autopar_constrain": "it passes its operand on as the user chose",
    "sharding_constraint": "it passes its operand on in pieces that the user chose",
}
"""Primitives with a rule and without a case, and why."""


def cases() -> list[Case]:
    """Every case; made by a function because arrays of 64 bits need JAX to be told first."""
    modules = (elementwise, shape, linalg, reduction, random, indexing, scatters, convolution, libraries, attention)
    return [case for module in modules for case in module.cases()]
