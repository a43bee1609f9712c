"""The nodes that rewrites add to a program: a barrier, a sum of two."""

from __future__ import annotations

from passes.ir import Node

BARRIER, SUM = "optimization_barrier", "add"


def barrier(inputs: tuple[int, ...], outputs: tuple[int, ...], *, source: str, scope: str) -> Node:
    """A node that hands on all of its operands when the last of them is there."""
    return Node(primitive=BARRIER, inputs=inputs, outputs=outputs, source=source, scope=scope)


def sum_of(first: int, second: int, output: int, *, source: str, scope: str) -> Node:
    """A node that adds two values."""
    return Node(primitive=SUM, inputs=(first, second), outputs=(output,), source=source, scope=scope)
