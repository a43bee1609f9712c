"""A traced step whose layers compute again what they do not keep, as `passes.remat` has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar import jax_compat
from autopar.flatten import Equation
from autopar.trace import Traced
from passes.remat import Kept, recompute


def recomputed(traced: Traced, kept: Sequence[Kept]) -> Traced:
    """The same step with layer k keeping `kept[k]` for its backward pass. Raises PlanningError for a wrong number."""
    found = recompute(traced.graph, kept)
    barrier = Equation(primitive=jax_compat.optimization_barrier_p)
    equations = tuple(barrier if origin is None else traced.equations[origin] for origin in found.origins)
    return replace(traced, graph=found.graph, equations=equations)
