"""Which part of a training step a node belongs to, read off JAX's own name stack."""

from __future__ import annotations

from typing import Literal

from passes.ir import Node

Phase = Literal["forward", "backward"]


def phase(node: Node) -> Phase:
    """`backward` for a node that differentiation transposed, else `forward` (the optimizer included).

    `jax.grad` stamps `transpose(jvp(...))` on every backward equation and `rematted_computation` on what
    `jax.checkpoint` computes again.
    """
    return "backward" if "transpose(" in node.scope or "rematted_computation" in node.scope else "forward"
