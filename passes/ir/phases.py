"""The phase of a training step that a node or an operator of a plan belongs to, from JAX's own name stack."""

from __future__ import annotations

from typing import Literal, Protocol

from passes.ir.graph import Node

Phase = Literal["forward", "backward", "apply"]

PHASES: tuple[Phase, ...] = ("forward", "backward", "apply")

LOOP = "microbatches"
"""The scope of the loop over microbatches."""


class Scoped(Protocol):
    """A value that knows the name stack it was traced under: a node, or an operator of a plan."""

    @property
    def scope(self) -> str: ...


def phase(node: Scoped) -> Phase:
    """`backward` for a node that differentiation transposed, `forward` for one it traced, `apply` for the rest.

    `jax.grad` stamps `jvp(...)` on the equations of the differentiated function, `transpose(jvp(...))` on their
    transposes and `rematted_computation` on what `jax.checkpoint` computes again. A step without a gradient is all
    `apply`.
    """
    if "transpose(" in node.scope or Node.RECOMPUTED in node.scope:
        return "backward"
    return "forward" if "jvp(" in node.scope else "apply"
