"""The phase of a training step that a node belongs to, from JAX's own name stack."""

from __future__ import annotations

from typing import Literal

from passes.ir.graph import Node

Phase = Literal["forward", "backward", "apply"]

PHASES: tuple[Phase, ...] = ("forward", "backward", "apply")

LOOP = "microbatches"
"""The scope of the loop over microbatches."""


def phase(node: Node) -> Phase:
    """`backward` for a node that differentiation transposed, `forward` for one it traced, `apply` for the rest.

    `jax.grad` stamps `jvp(...)` on the equations of the differentiated function, `transpose(jvp(...))` on their
    transposes and `rematted_computation` on what `jax.checkpoint` computes again. A step without a gradient is all
    `apply`.
    """
    if "transpose(" in node.scope or node.is_recomputed:
        return "backward"
    return "forward" if "jvp(" in node.scope else "apply"
