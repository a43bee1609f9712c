"""Primitives that have no sharding rule on purpose, each with the reason that reports and errors give."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_GROUPS = {
    "tracing puts what it calls in its place": (
        "closed_call custom_jvp_call custom_linear_solve custom_vjp_call eval_jaxpr jit remat2"
    ),
    "JAX itself makes none since jit; it runs whole": "call",
    "its body is planned as a program of its own": "cond scan while",
    "it has a meaning only inside shard_map, whose body is already one device's": (
        "all_gather all_to_all axis_index pmax pmin ppermute psum ragged_all_to_all"
    ),
    "it reads or writes a mutable reference, which no plan can keep in order": "get swap",
    "it makes or takes a token, which orders side effects and has no dimensions": "after_all create_token",
    "it stands for a derivative while JAX is transposing, and is gone from what it traces": "custom_lin",
    "it lifts a constant into a trace and leaves no equation there": "stage",
    "its one scalar has no dimension to cut": "empty2",
    "it only keeps its operand alive and has no result to place": "dce_sink",
    "its bits depend on the whole shape and, with the default algorithm, on the backend": "rng_bit_generator",
    "its numbers depend on the backend's own state and on the whole shape": "rng_uniform",
}

WITHOUT_RULE: Mapping[str, str] = MappingProxyType(
    {primitive: reason for reason, primitives in _GROUPS.items() for primitive in primitives.split()}
)
"""Primitive -> why it has no rule."""
